"""Real clients: the Python packages of OpenAI and Anthropic. Run alone: pytest THIS_FILE"""

from __future__ import annotations

import time
from typing import Any

import anthropic
import openai
from helpers.server import ServerTestCase, write_tiny_pair

KEY = "a-key"
USER: Any = [{"role": "user", "content": "Hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}},
    "required": ["on"],
    "additionalProperties": False,
}
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ m['tool_calls'] or '' }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ENDLESS: Any = {"ignore_eos": True}
GREEDY: Any = {"temperature": 0}  # Anthropic's client has no name for it


class TestClients(ServerTestCase):
    headers = {"x-api-key": KEY.encode()}

    @classmethod
    def server_flags(cls) -> list[str]:
        target, _ = write_tiny_pair(cls.models)
        template = cls.models / "template.jinja"
        template.write_text(TEMPLATE)
        flags = ["--model-path", str(target), "--api-key", KEY, "--chat-template", str(template)]
        return [*flags, "--skip-server-warmup", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        url = cls.server.url
        cls.openai = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
        cls.anthropic = anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)
        cls.addClassCleanup(cls.openai.close)
        cls.addClassCleanup(cls.anthropic.close)

    def test_openai_chat(self) -> None:
        asked: Any = {"model": "m", "messages": USER, "max_tokens": 8, "temperature": 0}
        whole = self.openai.chat.completions.create(**asked, extra_body=ENDLESS)
        options: Any = {"include_usage": True}
        chunks = list(
            self.openai.chat.completions.create(
                **asked, stream=True, stream_options=options, extra_body=ENDLESS
            )
        )
        text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        self.assertEqual(text, whole.choices[0].message.content)
        self.assertEqual(chunks[-1].usage, whole.usage)
        with self.assertRaises(openai.BadRequestError) as caught:
            self.openai.chat.completions.create(**{**asked, "max_tokens": 5000})
        self.assertEqual(caught.exception.code, "context_length_exceeded")
        self.assertIn("4096", caught.exception.message)

    def test_responses(self) -> None:
        asked: Any = {"model": "m", "input": "Hello", "max_output_tokens": 9, "temperature": 0}
        asked["extra_body"] = ENDLESS
        whole = self.openai.responses.create(**asked)
        self.assertEqual((whole.status, whole.usage.output_tokens), ("incomplete", 9))
        self.assertEqual(self.openai.responses.retrieve(whole.id), whole)
        events = list(self.openai.responses.create(**asked, stream=True))
        self.assertEqual(events[-1].response.output_text, whole.output_text)
        self.assertEqual("".join(e.delta for e in events if e.type.endswith(".delta")), whole.output_text)
        more = self.openai.responses.create(**{**asked, "previous_response_id": whole.id, "input": "More"})
        said = f"<user>Hello\n<assistant>{whole.output_text}\n<user>More\n<assistant>"
        self.assertEqual(more.usage.input_tokens, len(said.encode()))

    def test_responses_with_logprobs(self) -> None:
        asked: Any = {"model": "m", "input": "Hello", "max_output_tokens": 9, "temperature": 0}
        asked |= {"extra_body": ENDLESS, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
        part: Any = self.openai.responses.create(**asked).output[0].content[0]
        text = b"".join(bytes(entry.bytes) for entry in part.logprobs).decode(errors="replace")
        self.assertEqual((len(part.logprobs), text), (9, part.text))
        for entry in part.logprobs:
            self.assertEqual(entry.top_logprobs[0].logprob, entry.logprob)  # greedy
            self.assertEqual(len(entry.top_logprobs), 2)
        streamed = [e for e in self.openai.responses.create(**asked, stream=True) if hasattr(e, "logprobs")]
        *deltas, done = streamed
        told = [entry.logprob for event in deltas for entry in event.logprobs]
        self.assertEqual(told, [entry.logprob for entry in part.logprobs])
        self.assertEqual([entry.logprob for entry in done.logprobs], told)

    def test_responses_in_the_background(self) -> None:
        asked: Any = {"model": "m", "input": "Hello", "background": True, "extra_body": ENDLESS}
        begun = self.openai.responses.create(**asked)
        self.assertEqual(begun.status, "queued")
        cancelled = self.openai.responses.cancel(begun.id)
        self.assertEqual(cancelled.status, "cancelled")
        self.assertEqual(self.openai.responses.retrieve(begun.id), cancelled)
        self.wait_until_idle()
        ended = self.openai.responses.create(**{**asked, "max_output_tokens": 3})
        deadline = time.monotonic() + 20
        while (seen := self.openai.responses.retrieve(ended.id)).status in ("queued", "in_progress"):
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.02)
        self.assertEqual((seen.status, seen.usage.output_tokens), ("incomplete", 3))
        self.openai.responses.delete(ended.id)
        with self.assertRaises(openai.NotFoundError):
            self.openai.responses.retrieve(ended.id)

    def test_a_message_is_aborted_by_its_id(self) -> None:
        asked: Any = {"model": "m", "messages": USER, "max_tokens": 3900, "extra_body": ENDLESS}
        with self.anthropic.messages.stream(**asked) as stream, self.assertRaises(anthropic.APIStatusError):
            for event in stream:
                if event.type == "message_start":
                    self.post("/abort_request", rid=event.message.id)
        self.wait_until_idle()

    def test_messages_whole_and_streamed(self) -> None:
        asked: Any = {
            "model": "m",
            "messages": USER,
            "max_tokens": 9,
            "extra_body": GREEDY | ENDLESS,
        }
        asked["system"] = [{"type": "text", "text": "Be short"}]
        whole = self.anthropic.messages.create(**asked)
        self.assertEqual((whole.type, whole.role, whole.stop_reason), ("message", "assistant", "max_tokens"))
        counted = self.anthropic.messages.count_tokens(model="m", messages=USER, system=asked["system"])
        usage = whole.usage
        self.assertEqual(counted.input_tokens, usage.input_tokens + (usage.cache_read_input_tokens or 0))
        self.assertEqual(counted.input_tokens, len("<system>Be short\n<user>Hello\n<assistant>"))
        with self.anthropic.messages.stream(**asked) as stream:
            final = stream.get_final_message()
        self.assertEqual([b.text for b in final.content], [b.text for b in whole.content])
        self.assertEqual(final.stop_reason, whole.stop_reason)
        self.assertEqual(final.usage.output_tokens, usage.output_tokens)

    def test_messages_tools(self) -> None:
        tool = {"name": "light", "description": "d", "input_schema": SCHEMA}
        asked: Any = {
            "model": "m",
            "messages": USER,
            "max_tokens": 400,
            "tools": [tool],
            "extra_body": GREEDY,
        }
        asked["tool_choice"] = {"type": "tool", "name": "light"}
        whole = self.anthropic.messages.create(**asked)
        block: Any = whole.content[0]
        self.assertEqual((whole.stop_reason, block.type, block.name), ("tool_use", "tool_use", "light"))
        self.assertIsInstance(block.input["on"], bool)
        with self.anthropic.messages.stream(**asked) as stream:
            final: Any = stream.get_final_message()
        self.assertEqual([b.input for b in final.content], [b.input for b in whole.content])
        result = {"type": "tool_result", "tool_use_id": block.id, "content": "done"}
        said = {"role": "assistant", "content": [block.model_dump()]}
        talk: Any = [*USER, said, {"role": "user", "content": [result]}]
        more = self.anthropic.messages.count_tokens(model="m", messages=talk).input_tokens
        self.assertGreater(more, len("<tool>done\n"))

    def test_messages_errors(self) -> None:
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"max_tokens": 5000}, "4096"),
            ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "image"),
            ({"messages": [{"role": "system", "content": "x"}]}, "system"),
            ({"thinking": {"type": "maybe"}}, "thinking"),
            ({"thinking": {"type": "enabled", "budget_tokens": "x"}}, "thinking_budget"),
            ({"mcp_servers": []}, "mcp_servers"),
            ({"tool_choice": {"type": "maybe"}}, "tool_choice"),
            ({"system": [{"type": "text"}]}, "system"),
        ]
        for change, word in wrong:
            body = {"model": "m", "messages": USER, "max_tokens": 4, **change}
            for stream in (False, True):
                answer = self.post("/v1/messages", **body, stream=stream)
                self.assertEqual(answer.status_code, 400, change)
                self.assertEqual(answer.json()["error"]["type"], "invalid_request_error")
                self.assertIn(word, answer.json()["error"]["message"])
        self.assertEqual(self.post("/v1/messages", messages=USER).status_code, 400)

    def test_tokens_and_back(self) -> None:
        for prefix in ("", "/v1"):
            for prompt, tokens in (("héllo", list("héllo".encode())), (["a", "bc"], [[97], [98, 99]])):
                made = self.post(f"{prefix}/tokenize", prompt=prompt).json()
                self.assertEqual((made["tokens"], made["max_model_len"]), (tokens, 4096))
                self.assertEqual(self.post(f"{prefix}/detokenize", tokens=tokens).json(), {"text": prompt})
        for path, body in (
            ("/tokenize", {"prompt": 1}),
            ("/tokenize", {"prompt": "a", "add_special_tokens": 3}),
            ("/tokenize", []),
            ("/detokenize", {"tokens": [10**9]}),
            ("/detokenize", {"tokens": "a"}),
            ("/detokenize", {"tokens": [1, [2]]}),
        ):
            self.assertEqual(self.client.post(path, json=body).status_code, 400, (path, body))

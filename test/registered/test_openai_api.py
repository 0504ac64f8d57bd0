"""OpenAI's endpoints on a tiny model without a drafter, behind a key. Run alone: pytest THIS_FILE"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from helpers.server import ServerTestCase, write_tiny_pair

KEY = "the key, with blanks: and signs!"
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": "Hello"}]


class TestOpenAI(ServerTestCase):
    headers = {"authorization": f"Bearer {KEY}".encode()}

    @classmethod
    def server_flags(cls) -> list[str]:
        target, _ = write_tiny_pair(cls.models)
        flags = ["--model-path", str(target), "--api-key", KEY, "--skip-server-warmup", "--page-size", "16"]
        return [*flags, "--max-running-requests", "4", "--max-queued-requests", "4", "--disable-radix-cache"]

    def test_chat(self) -> None:
        answer = self.post("/v1/chat/completions", model="any", messages=MESSAGES, **GREEDY).json()
        self.assertEqual((answer["object"], answer["model"]), ("chat.completion", "any"))
        choice = answer["choices"][0]
        self.assertEqual((choice["index"], choice["message"]["role"]), (0, "assistant"))
        self.assertEqual((choice["finish_reason"], choice["matched_stop"]), ("length", None))
        prompt = "<user>Hello\n<assistant>"
        usage = {"prompt_tokens": len(prompt), "completion_tokens": 12, "total_tokens": len(prompt) + 12}
        self.assertEqual(answer["usage"], answer["usage"] | usage)
        native = self.generate(
            text=prompt, sampling_params={"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
        )
        self.assertEqual(choice["message"]["content"], native["text"])
        by_ids = self.post(
            "/v1/chat/completions", messages=[], input_ids=list(prompt.encode()), **GREEDY
        ).json()
        self.assertEqual(by_ids["choices"][0]["message"]["content"], native["text"])

    def test_chat_stream(self) -> None:
        body = {"messages": MESSAGES, "n": 2, **GREEDY}
        whole = self.post("/v1/chat/completions", **body).json()
        options = {"include_usage": True, "continuous_usage_stats": True}
        events = self.stream("/v1/chat/completions", **body, stream_options=options)
        for index in (0, 1):
            own = [c for e in events for c in e["choices"] if c["index"] == index]
            self.assertEqual(own[0]["delta"], {"role": "assistant", "content": ""})
            self.assertEqual([c["finish_reason"] for c in own[:-1]], [None] * (len(own) - 1))
            self.assertEqual(own[-1]["finish_reason"], "length")
            text = "".join(c["delta"].get("content", "") for c in own)
            self.assertEqual(text, whole["choices"][index]["message"]["content"])
        self.assertEqual({e["id"] for e in events}, {events[0]["id"]})
        self.assertEqual(events[-1]["choices"], [])
        self.assertEqual(events[-1]["usage"], whole["usage"])
        self.assertTrue(all(e["usage"]["prompt_tokens"] for e in events))
        events = self.stream("/v1/chat/completions", **body)
        self.assertTrue(all(e["usage"] is None and e["choices"] for e in events))

    def test_messages(self) -> None:
        def answer(messages: list[Any], **more: Any) -> Any:
            return self.post("/v1/chat/completions", messages=messages, **{**GREEDY, "max_tokens": 1}, **more)

        parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}]
        joined = answer([{"role": "user", "content": "Hello there"}]).json()["usage"]
        self.assertEqual(answer([{"role": "user", "content": parts}]).json()["usage"], joined)
        begun = [*MESSAGES, {"role": "assistant", "content": "Well"}]
        tokens = answer(begun, continue_final_message=True).json()["usage"]["prompt_tokens"]
        self.assertEqual(tokens, len("<user>Hello\n<assistant>Well"))
        image = [{"type": "image_url", "image_url": {"url": "x"}}]
        for messages, word in (
            ([], "messages"),
            ([{"role": "user", "content": image}], "image_url"),
            ([{"role": "nobody", "content": "x"}], "nobody"),
            ([{"role": "user"}], "content"),
        ):
            response = answer(messages)
            self.assertEqual(response.status_code, 400)
            self.assertIn(word, response.json()["message"])

    def test_completions(self) -> None:
        answer = self.post("/v1/completions", prompt="abc", **GREEDY).json()
        self.assertEqual(answer["object"], "text_completion")
        text = answer["choices"][0]["text"]
        by_ids = self.post("/v1/completions", prompt=list(b"abc"), **GREEDY).json()
        self.assertEqual(by_ids["choices"][0]["text"], text)
        echo = self.post("/v1/completions", prompt=list(b"abc"), echo=True, **GREEDY).json()
        self.assertEqual(echo["choices"][0]["text"], "abc" + text)
        self.assertEqual(
            self.post("/v1/completions", prompt="abc", temperature=0).json()["usage"]["completion_tokens"], 16
        )
        for prompts in (["abc", "de"], [list(b"abc"), list(b"de")]):
            several = self.post("/v1/completions", prompt=prompts, n=2, **GREEDY).json()
            self.assertEqual([choice["index"] for choice in several["choices"]], [0, 1, 2, 3])
            self.assertEqual(several["choices"][1]["text"], text)
            self.assertEqual(several["usage"]["prompt_tokens"], 5)
            self.assertEqual(several["usage"]["completion_tokens"], 48)
        events = self.stream("/v1/completions", prompt="abc", echo=True, **GREEDY)
        self.assertEqual("".join(c["text"] for e in events for c in e["choices"]), "abc" + text)
        self.assertEqual(events[-1]["choices"][0]["finish_reason"], "length")

    def test_stop_and_seed(self) -> None:
        ascii_only = {str(i): -100.0 for i in [*range(32), *range(127, 256)]}
        body = {"prompt": "abc", **GREEDY, "logit_bias": ascii_only}
        text = self.post("/v1/completions", **body).json()["choices"][0]["text"]
        stopped = self.post("/v1/completions", **body, stop=[text[4:6]]).json()["choices"][0]
        self.assertEqual(stopped["text"], text[: text.index(text[4:6])])
        self.assertEqual((stopped["finish_reason"], stopped["matched_stop"]), ("stop", text[4:6]))
        hot = {**body, "temperature": 1.0, "seed": 5}
        texts = {self.post("/v1/completions", **hot).json()["choices"][0]["text"] for _ in range(3)}
        self.assertEqual(len(texts), 1)

    def test_logprobs_are_the_native_ones(self) -> None:
        prompt = "<user>Hello\n<assistant>"
        native = self.generate(
            text=prompt,
            sampling_params={"temperature": 0, "max_new_tokens": 12, "ignore_eos": True},
            return_logprob=True,
            logprob_start_len=0,
        )["meta_info"]
        expected = [entry[0] for entry in native["output_token_logprobs"]]
        chat = self.post(
            "/v1/chat/completions", messages=MESSAGES, logprobs=True, top_logprobs=2, **GREEDY
        ).json()["choices"][0]["logprobs"]["content"]
        for token, value in zip(chat, expected, strict=True):
            self.assertAlmostEqual(token["logprob"], value, places=4)
            self.assertEqual(token["top_logprobs"][0]["logprob"], token["logprob"])
        body = {"prompt": prompt, "echo": True, "logprobs": 1, **GREEDY}
        echoed = self.post("/v1/completions", **body).json()["choices"][0]["logprobs"]
        before = [entry[0] for entry in native["input_token_logprobs"]]
        self.assertEqual((before[0], echoed["token_logprobs"][0]), (None, None))
        for value, other in zip(echoed["token_logprobs"][1:], [*before[1:], *expected], strict=True):
            self.assertAlmostEqual(value, other, places=4)
        # A limit of 0 scores a text.
        scored = self.post("/v1/completions", **body | {"max_tokens": 0}).json()
        choice = scored["choices"][0]
        self.assertEqual((choice["text"], choice["finish_reason"]), (prompt, "length"))
        self.assertEqual(choice["logprobs"]["token_logprobs"], echoed["token_logprobs"][: len(before)])
        self.assertEqual(scored["usage"]["completion_tokens"], 0)
        for stream in (False, True):
            fields = {"text": prompt, "sampling_params": {"max_new_tokens": 0}, "logprob_start_len": 0}
            fields |= {"return_logprob": True, "top_logprobs_num": 1}
            fields["sampling_params"] |= {"temperature": 0}
            answer = self.stream("/generate", **fields)[-1] if stream else self.generate(**fields)
            told = answer["meta_info"]
            self.assertEqual((answer["text"], answer["output_ids"], told["completion_tokens"]), ("", [], 0))
            self.assertEqual([entry[0] for entry in told["input_token_logprobs"]], before)
            # Of the first answer place there is what it would have begun with, as in SGLang.
            ((logprob, token_id, _),) = told["output_token_logprobs"]
            self.assertEqual(token_id, native["output_token_logprobs"][0][1])
            self.assertAlmostEqual(logprob, expected[0], places=4)
            self.assertEqual(told["output_top_logprobs"], [[[logprob, token_id, None]]])
            self.assertEqual(told["output_token_logprobs_length"], 1)
            self.assertEqual(told["finish_reason"], {"type": "length", "length": 0})

    def test_models(self) -> None:
        card = self.client.get("/v1/models").json()["data"][0]
        self.assertEqual((card["object"], card["owned_by"], card["max_model_len"]), ("model", "sglang", 4096))
        self.assertEqual(self.client.get(f"/v1/models/{card['id']}").json()["id"], card["id"])
        missing = self.client.get("/v1/models/missing")
        self.assertEqual(missing.status_code, 404)
        self.assertEqual(missing.json()["error"]["code"], "model_not_found")

    def test_errors_have_their_shape(self) -> None:
        cases: list[tuple[dict[str, Any], str]] = [
            ({}, "prompt"),
            ({"prompt": "a", "temperature": "hot"}, "temperature"),
            ({"prompt": "a", "temperature": -1}, "temperature"),
            ({"prompt": "a", "logprobs": -3}, "logprobs"),
            ({"prompt": "a", "suffix": "b"}, "suffix"),
            (
                {"prompt": "a", "response_format": {"type": "xml"}},
                "response_format must be an object",
            ),
            ({"prompt": "a", "response_format": {"type": "json_schema"}}, "must have json_schema"),
            ({"prompt": "a", "response_format": {"type": "json_object"}, "regex": "a"}, "only one of them"),
            ({"prompt": "a", "response_format": {"type": "json_object"}, "json_schema": "{}"}, "only one of"),
            ({"prompt": []}, "prompt"),
            ({"prompt": "a", "max_tokens": 5000}, "4096"),
            ({"prompt": "a", "n": 0}, "n must"),
            ({"prompt": "a", "best_of": 2}, "best_of"),
            ({"prompt": "a", "max_tokens": -1}, "max_tokens must be >= 0, got -1"),
            (
                {"prompt": "a", "max_tokens": 1, "min_tokens": 2},
                "min_tokens (2) must not exceed max_tokens (1)",
            ),
            ({"prompt": "a", "seed": 2**64}, "seed must fit"),
        ]
        for body, word in cases:
            response = self.post("/v1/completions", **body)
            self.assertEqual(response.status_code, 400, body)
            error = response.json()
            code = "context_length_exceeded" if word == "4096" else 400
            self.assertEqual((error["object"], error["code"]), ("error", code))
            self.assertIn(word, error["message"])
            self.assertNotIn("sampling_seed", error["message"])
            self.assertEqual(sorted(error), ["code", "message", "object", "param", "type"])
        tools = [{"type": "function", "function": {"name": "f"}}]
        response = self.post("/v1/chat/completions", messages=MESSAGES, tools=tools)
        self.assertEqual(response.status_code, 400)
        self.assertIn("tools", response.json()["message"])
        allowed = {
            "tools": [],
            "logprobs": False,
            "response_format": {"type": "text"},
            "user": "me",
            "best_of": 1,
        }
        response = self.post("/v1/chat/completions", messages=MESSAGES, **GREEDY, **allowed)
        self.assertEqual(response.status_code, 200, response.text)

    def test_the_key(self) -> None:
        for headers in ({}, {"authorization": b"Bearer wrong"}, {"authorization": KEY.encode()}):
            self.assertEqual(httpx.get(f"{self.server.url}/v1/models", headers=headers).status_code, 401)
        self.assertEqual(httpx.get(f"{self.server.url}/health").status_code, 200)
        info = httpx.get(f"{self.server.url}/server_info", headers=self.headers)
        self.assertEqual(info.status_code, 200)
        self.assertNotIn(KEY, info.text)
        self.assertEqual(self.client.get("/metrics").status_code, 404)

    def test_a_full_queue_is_503(self) -> None:
        crowd = [
            self.start_crowd("running", "num_running_reqs"),
            self.start_crowd("waiting", "num_queue_reqs"),
        ]
        for stream in (False, True):
            response = self.post("/v1/completions", prompt="no room", stream=stream)
            self.assertEqual(response.status_code, 503)
            self.assertIn("queue", response.json()["message"])
        self.assertEqual(self.client.get("/health_generate").status_code, 200)
        self.post("/abort_request", abort_all=True)
        for thread in crowd:
            thread.join(10)
            self.assertFalse(thread.is_alive())

    def test_an_id_aborts_every_prompt_of_a_call(self) -> None:
        body = {**GREEDY, "max_tokens": 3000, "prompt": ["one", "two"], "rid": "both"}
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(self.post, "/v1/completions", **body)
            while self.server_state()["num_running_reqs"] < 2:
                time.sleep(0.02)
            self.post("/abort_request", rid="both")
            choices = answer.result(10).json()["choices"]
        self.assertEqual([choice["finish_reason"] for choice in choices], ["abort", "abort"])

    def test_the_schema_is_served(self) -> None:
        """Not FastAPI's, which would say nothing of the bodies."""
        schemas = self.client.get("/openapi.json").json()["components"]["schemas"]
        self.assertIn("logprobs", schemas["CompletionBody"]["properties"])

    def start_crowd(self, rid: str, figure: str) -> threading.Thread:
        endless = {**GREEDY, "max_tokens": 3000, "prompt": "full", "n": 4, "rid": rid}
        thread = threading.Thread(target=self.post, args=("/v1/completions",), kwargs=endless)
        thread.start()
        while self.server_state()[figure] < 4:
            time.sleep(0.02)
        return thread

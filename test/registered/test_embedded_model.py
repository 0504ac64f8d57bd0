"""The embedded model, as `make serve` starts it. Run alone: pytest THIS_FILE"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from helpers.server import ServerTestCase

PROMPT = "def fibonacci(n):\n"
GREEDY = {"temperature": 0, "max_new_tokens": 32, "ignore_eos": True}
CITY = {
    "type": "object",
    "properties": {"name": {"enum": ["Berlin", "Paris"]}, "large": {"type": "boolean"}},
    "required": ["name", "large"],
}
FORMED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Describe the capital of France as JSON."}],
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "city", "schema": CITY, "strict": True},
    },
    "temperature": 0,
    "max_tokens": 40,
}


class TestEmbeddedModel(ServerTestCase):
    @classmethod
    def server_flags(cls) -> list[str]:
        return ["--max-total-tokens", "20000"]

    def set_threshold(self, value: int | None) -> None:
        change = {"speculative_disable_bs_threshold": value}
        self.assertEqual(self.post("/set_internal_state", server_args=change).status_code, 200)

    def test_it_answers_a_question(self) -> None:
        messages = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
        answer = self.post("/v1/chat/completions", messages=messages, max_tokens=32, temperature=0).json()
        self.assertIn("Paris", answer["choices"][0]["message"]["content"])
        self.assertEqual(answer["model"], "SmolLM2-135M-Instruct")

    def test_the_text_does_not_depend_on_the_mode(self) -> None:
        """Equal but for near ties, which rounding may decide: this prompt has none."""
        answers = {}
        for threshold in (0, None):
            self.set_threshold(threshold)
            answers[threshold] = self.generate(text=PROMPT, sampling_params=GREEDY)
        self.set_threshold(4)
        self.assertEqual(answers[0]["output_ids"], answers[None]["output_ids"])
        self.assertEqual(answers[0]["meta_info"]["decode_steps_spec"], 0)
        self.assertEqual(answers[None]["meta_info"]["decode_steps_plain"], 0)
        self.assertGreater(answers[None]["meta_info"]["spec_accept_length"], 1.5)

    def test_few_speculate_and_many_do_not(self) -> None:
        self.set_threshold(4)
        with ThreadPoolExecutor(8) as pool:
            metas = [a["meta_info"] for a in pool.map(self.ask, range(8))]
        self.assertTrue(any(meta["decode_steps_plain"] > 0 for meta in metas))
        self.assertGreater(self.ask(0)["meta_info"]["decode_steps_spec"], 0)

    def ask(self, number: int) -> Any:
        return self.generate(text=f"{number}. {PROMPT}", sampling_params=GREEDY)

    def test_replies_have_the_form_asked_for(self) -> None:
        """In both modes, whole and streamed, beside a reply without a form."""
        replies = []
        for threshold in (0, None):
            self.set_threshold(threshold)
            with ThreadPoolExecutor(2) as pool:
                free = pool.submit(self.ask, 1)
                answer = self.post("/v1/chat/completions", **FORMED).json()
                self.assertTrue(free.result()["text"])
            replies.append(answer["choices"][0]["message"]["content"])
            self.assertEqual(answer["choices"][0]["finish_reason"], "stop")
            city = json.loads(replies[-1])
            self.assertEqual((list(city), city["name"]), (["name", "large"], "Paris"))
            self.assertIs(type(city["large"]), bool)
        self.assertEqual(*replies)
        events = self.stream("/v1/chat/completions", **FORMED)
        parts = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
        self.assertEqual("".join(parts), replies[0])
        digits = {"regex": "[0-9]{4}", "n": 2, "temperature": 1.0, "max_new_tokens": 9}
        for answer in self.generate(text="In the year ", sampling_params=digits):
            self.assertRegex(answer["text"], r"^[0-9]{4}$")
        self.set_threshold(4)

    def test_a_wrong_grammar_fails_its_own_request(self) -> None:
        for stream in (False, True):
            response = self.post("/generate", text="a", sampling_params={"regex": "[a"}, stream=stream)
            self.assertEqual(response.status_code, 400)
            self.assertIn("the regex can't be used", response.json()["error"]["message"])
            schema = {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}}
            response = self.post("/v1/completions", prompt="a", stream=stream, **schema)
            self.assertEqual(response.status_code, 400)
            self.assertIn("the json_schema can't be used", response.json()["message"])
        self.assertTrue(self.ask(1)["text"])

    def test_metrics_are_served(self) -> None:
        text = self.client.get("/metrics").text
        self.assertIn('sglang:decode_steps_total{engine_type="unified",mode="plain"', text)
        self.assertIn("ready to roll", self.server.log())

"""The embedded model, as `make serve` starts it. Run alone: pytest THIS_FILE"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from helpers.server import ServerTestCase

PROMPT = "def fibonacci(n):\n"
GREEDY = {"temperature": 0, "max_new_tokens": 32, "ignore_eos": True}


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

    def test_metrics_are_served(self) -> None:
        text = self.client.get("/metrics").text
        self.assertIn('sglang:decode_steps_total{engine_type="unified",mode="plain"', text)
        self.assertIn("ready to roll", self.server.log())

"""``auto`` and schedules on a running server, changed while requests run. Run alone: pytest THIS_FILE"""

from __future__ import annotations

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from helpers.server import ServerTestCase, speculative_flags, write_tiny_pair

THRESHOLD, SCHEDULE = "speculative_disable_bs_threshold", "speculative_bs_schedule"
CHANGES = (
    {THRESHOLD: "auto"}, {THRESHOLD: 2}, {THRESHOLD: "auto"}, {THRESHOLD: None},
    {SCHEDULE: "1-1:3,2-4:1,5-:2"}, {THRESHOLD: "auto"}, {THRESHOLD: 0},
)  # fmt: skip


class TestModes(ServerTestCase):
    @classmethod
    def server_flags(cls) -> list[str]:
        target, drafter = write_tiny_pair(cls.models)
        flags = ["--model-path", str(target), *speculative_flags(drafter), "--dtype", "float64"]
        flags += ["--max-running-requests", "8", "--max-total-tokens", "8192", "--enable-metrics"]
        return [*flags, "--speculative-disable-bs-threshold", "auto", "--disable-radix-cache"]

    def change(self, **server_args: Any) -> None:
        response = self.post("/set_internal_state", server_args=server_args)
        self.assertEqual((response.status_code, response.json()["server_args"]), (200, server_args))

    def answers(self) -> list[list[int]]:
        """Of eight streams at once, half of them sampled."""

        def one(index: int) -> list[int]:
            params = {"max_new_tokens": 80, "ignore_eos": True, "sampling_seed": index}
            params["temperature"] = 0.0 if index % 2 else 0.8
            found: list[int] = self.generate(text=f"stream {index}", sampling_params=params)["output_ids"]
            return found

        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(one, range(8)))

    def test_texts_are_plains_whatever_decides_the_mode(self) -> None:
        self.change(**{THRESHOLD: 0})
        plain = self.answers()
        self.change(**{THRESHOLD: "auto"})
        self.assertEqual(self.answers(), plain)
        done = threading.Event()

        def change_all_the_time() -> int:
            changes = itertools.cycle(CHANGES)
            for count in itertools.count():
                if done.is_set():
                    return count
                self.change(**next(changes))
                time.sleep(0.01)
            raise AssertionError

        with ThreadPoolExecutor(1) as pool:
            changing = pool.submit(change_all_the_time)
            try:
                restless = self.answers()
            finally:
                done.set()
            self.assertGreater(changing.result(), len(CHANGES))
        self.assertEqual(restless, plain)
        state = self.server_state()
        reasons = {name.partition(":")[2] for name in state["spec_decisions"]}
        self.assertLessEqual({"cost", "batch_size"}, reasons)

    def test_what_auto_believes_is_told(self) -> None:
        self.change(**{THRESHOLD: "auto"})
        self.generate(text="a", sampling_params={"max_new_tokens": 30, "ignore_eos": True})
        info = self.client.get("/server_info").json()
        self.assertEqual(info[THRESHOLD], "auto")
        state = info["internal_states"][0]
        self.assertEqual((state[THRESHOLD], state[SCHEDULE]), ("auto", None))
        self.assertGreater(state["spec_auto"]["cost_corrections"]["common"], 0)
        self.assertIn("probe_credit_s", state["spec_auto"])
        self.assertIn("sglang:spec_decisions_total{", self.client.get("/metrics").text)
        self.assertIn("decode steps timed in", self.server.log())

    def test_a_schedule_that_can_not_be_is_refused(self) -> None:
        response = self.post("/set_internal_state", server_args={SCHEDULE: "1-:9"})
        self.assertEqual(response.status_code, 400)
        self.assertIn("needs steps of 9 drafts", response.json()["error"]["message"])

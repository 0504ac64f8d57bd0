"""What a server says about itself, what can be changed, and who may ask. Run alone: pytest THIS_FILE"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from helpers.server import ServerTestCase, speculative_flags, write_tiny_pair

PARAMS = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}


class TestControl(ServerTestCase):
    @classmethod
    def server_flags(cls) -> list[str]:
        target, drafter = write_tiny_pair(cls.models)
        flags = ["--model-path", str(target), *speculative_flags(drafter, threshold=2)]
        flags += ["--speculative-capture-max-bs", "6", "--served-model-name", "tiny", "--enable-metrics"]
        return [*flags, "--incremental-streaming-output", "--decode-log-interval", "5"]

    def set_threshold(self, value: Any) -> Any:
        return self.post("/set_internal_state", server_args={"speculative_disable_bs_threshold": value})

    def run_streams(self, count: int) -> list[Any]:
        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(lambda i: self.generate(text=f"{i}", sampling_params=PARAMS), range(count)))

    def tearDown(self) -> None:
        self.assertEqual(self.set_threshold(2).status_code, 200)

    def test_server_info(self) -> None:
        info = self.client.get("/server_info").json()
        self.assertEqual(info, info | {"served_model_name": "tiny", "status": "ready", "frontend": "python"})
        self.assertEqual(info["speculative_num_draft_tokens"], 4)
        self.assertIn("--served-model-name tiny", info["launch_command"])
        self.assertEqual(self.client.get("/get_server_info").json()["version"], info["version"])
        state = info["internal_states"][0]
        for name in (
            "last_gen_throughput",
            "memory_usage",
            "decode_steps",
            "spec_draft_len",
            "spec_switches",
        ):
            self.assertIn(name, state)

    def test_model_info_and_health(self) -> None:
        for path in ("/model_info", "/get_model_info"):
            info = self.client.get(path).json()
            self.assertEqual((info["served_model_name"], info["is_generation"]), ("tiny", True))
            self.assertEqual((info["model_type"], info["architectures"]), ("llama", ["LlamaForCausalLM"]))
        for path in ("/", "/health", "/ready", "/ping", "/health_generate"):
            self.assertEqual(self.client.get(path).status_code, 200, path)

    def test_threshold_is_changed_while_it_runs(self) -> None:
        self.assertEqual(self.set_threshold(0).json()["server_args"]["speculative_disable_bs_threshold"], 0)
        before = self.server_state()["decode_steps"]
        plain = self.generate(text="same text", sampling_params=PARAMS)
        after = self.server_state()
        self.assertEqual(after["speculative_disable_bs_threshold"], 0)
        self.assertEqual(after["decode_steps"]["spec"], before["spec"])
        self.assertEqual(plain["meta_info"]["decode_steps_spec"], 0)
        self.assertNotIn("spec_verify_ct", plain["meta_info"])
        self.assertEqual(self.set_threshold(None).status_code, 200)
        spec = self.generate(text="same text", sampling_params=PARAMS)
        self.assertGreater(spec["meta_info"]["decode_steps_spec"], 0)
        self.assertEqual(spec["output_ids"], plain["output_ids"])

    def test_threshold_that_can_not_be(self) -> None:
        for value in (7, -1, "many", 1.5):
            response = self.set_threshold(value)
            self.assertEqual(response.status_code, 400, value)
        self.assertIn("6", self.set_threshold(7).json()["error"]["message"])
        self.assertEqual(self.server_state()["speculative_disable_bs_threshold"], 2)
        response = self.post("/set_internal_state", server_args={"port": 1})
        self.assertEqual(response.status_code, 400)
        self.assertIn("port", response.json()["error"]["message"])
        self.assertEqual(self.post("/set_internal_state").status_code, 400)

    def test_many_streams_decode_plainly(self) -> None:
        before = self.server_state()
        self.run_streams(8)
        after = self.server_state()
        self.assertGreater(after["decode_steps"]["plain"], before["decode_steps"]["plain"])
        self.assertGreater(after["spec_switches"], before["spec_switches"])
        self.assertRegex(self.server.log(), r"Decode batch, #running-req: \d+, mode: (plain|spec\(k=3\))")

    def test_a_request_may_not_want_drafts(self) -> None:
        params = {**PARAMS, "speculative_draft_len": 0}
        meta = self.generate(text="plain", sampling_params=params)["meta_info"]
        self.assertEqual(meta["decode_steps_spec"], 0)
        self.assertGreater(meta["decode_steps_plain"], 0)

    def test_incremental_stream(self) -> None:
        whole = self.generate(text="pieces", sampling_params=PARAMS)
        events = self.stream("/generate", text="pieces", sampling_params=PARAMS)
        self.assertEqual("".join(event["text"] for event in events), whole["text"])
        self.assertEqual(sum((event["output_ids"] for event in events), []), whole["output_ids"])

    def test_metrics(self) -> None:
        before = self.metrics()
        self.generate(text="count", sampling_params=PARAMS)
        self.stream("/generate", text="count", sampling_params=PARAMS)
        after = self.metrics()

        def grew(name: str, labels: str = "") -> float:
            return after.get((name, labels), 0.0) - before.get((name, labels), 0.0)

        for streaming in ("false", "true"):
            labels = f'is_streaming="{streaming}"'
            self.assertEqual(grew("sglang:num_requests_total", labels), 1)
            self.assertEqual(grew("sglang:prompt_tokens_total", labels), 5)
            self.assertEqual(grew("sglang:generation_tokens_total", labels), 40)
            self.assertEqual(grew("sglang:time_to_first_token_seconds_count", labels), 1)
            self.assertEqual(grew("sglang:e2e_request_latency_seconds_count", labels), 1)
            # However many tokens a chunk has, each one after the first is one sample.
            self.assertEqual(grew("sglang:inter_token_latency_seconds_count", labels), 39)
        self.assertGreater(grew("sglang:decode_steps_total", 'mode="spec"'), 0)
        self.assertIn(("sglang:num_running_reqs", ""), after)

    def metrics(self) -> dict[tuple[str, str], float]:
        """(name, the label that tells samples of it apart) -> value."""
        values = {}
        for line in self.client.get("/metrics").text.splitlines():
            match = re.fullmatch(r"(\S+?)\{(.*)\} (\S+)", line)
            if match:
                label = re.search(r'(is_streaming|mode)="\w+"', match[2])
                values[match[1], label[0] if label else ""] = float(match[3])
        return values

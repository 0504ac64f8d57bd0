"""SGLang's own endpoints on a tiny model with a drafter. Run alone: pytest THIS_FILE"""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import httpx
from helpers.server import ServerTestCase

GREEDY = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
ENDLESS = {"temperature": 0, "max_new_tokens": 3000, "ignore_eos": True}


class TestNativeApi(ServerTestCase):
    def test_text_and_ids_give_the_same(self) -> None:
        by_text = self.generate(text="hello", sampling_params=GREEDY)
        by_ids = self.generate(input_ids=list(b"hello"), sampling_params=GREEDY, return_prompt_token_ids=True)
        self.assertEqual(by_text["output_ids"], by_ids["output_ids"])
        self.assertEqual(by_text["text"], bytes(by_text["output_ids"]).decode(errors="replace"))
        self.assertEqual(by_ids["prompt_token_ids"], list(b"hello"))
        self.assertNotIn("index", by_text)

    def test_meta_info(self) -> None:
        meta = self.generate(text="hello there", sampling_params=GREEDY, rid="my-request")["meta_info"]
        self.assertEqual(meta["id"], "my-request")
        self.assertEqual(meta["finish_reason"], {"type": "length", "length": 24})
        self.assertEqual((meta["prompt_tokens"], meta["completion_tokens"]), (11, 24))
        self.assertGreater(meta["e2e_latency"], 0)
        self.assertGreater(meta["spec_verify_ct"], 0)
        self.assertEqual(meta["decode_steps_spec"], meta["spec_verify_ct"])
        # All tokens but the prefill's come from speculative steps; the last may be cut at the limit.
        emitted = meta["spec_accept_length"] * meta["spec_verify_ct"]
        self.assertLessEqual(round(emitted) + meta["decode_steps_plain"], 24)
        self.assertEqual(sum(meta["spec_accept_histogram"]), meta["spec_verify_ct"])
        for old, new in (
            ("spec_accept_token_num", "spec_num_correct_drafts"),
            ("spec_draft_token_num", "spec_num_proposed_drafts"),
            ("spec_accept_histogram", "spec_correct_drafts_histogram"),
        ):
            self.assertEqual(meta[old], meta[new])

    def test_lists_and_n(self) -> None:
        texts = ["one", "two", "three"]
        answers = self.generate(text=texts, sampling_params=GREEDY)
        alone = [self.generate(text=text, sampling_params=GREEDY)["output_ids"] for text in texts]
        self.assertEqual([answer["output_ids"] for answer in answers], alone)
        self.assertEqual(len(self.generate(text=["one"], sampling_params=GREEDY)), 1)
        hot = {"temperature": 1.0, "max_new_tokens": 16, "ignore_eos": True, "n": 3, "sampling_seed": 7}
        answers = self.generate(text="same", sampling_params=hot)
        self.assertEqual([answer["index"] for answer in answers], [0, 1, 2])
        self.assertEqual(len({tuple(answer["output_ids"]) for answer in answers}), 3)
        again = self.generate(text="same", sampling_params=hot)
        self.assertEqual([a["output_ids"] for a in answers], [a["output_ids"] for a in again])
        params = [{**GREEDY, "max_new_tokens": size} for size in (1, 2)]
        answers = self.generate(text=["a", "b"], sampling_params=params)
        self.assertEqual([len(answer["output_ids"]) for answer in answers], [1, 2])

    def test_stream_is_cumulative_and_equal_to_the_whole(self) -> None:
        whole = self.generate(text="streams", sampling_params=GREEDY)
        events = self.stream("/generate", text="streams", sampling_params=GREEDY)
        for before, after in zip(events, events[1:], strict=False):
            self.assertTrue(after["text"].startswith(before["text"]))
            self.assertEqual(after["output_ids"][: len(before["output_ids"])], before["output_ids"])
            self.assertIsNone(before["meta_info"]["finish_reason"])
        self.assertGreater(len(events), 3)
        self.assertEqual(events[-1]["text"], whole["text"])
        self.assertEqual(events[-1]["output_ids"], whole["output_ids"])
        self.assertEqual(events[-1]["meta_info"]["finish_reason"]["type"], "length")

    def test_stream_of_several(self) -> None:
        params = {**GREEDY, "n": 2}
        events = self.stream("/generate", text=["x", "y"], sampling_params=params)
        last = {event["index"]: event for event in events}
        self.assertEqual(sorted(last), [0, 1, 2, 3])
        self.assertEqual(last[0]["output_ids"], last[1]["output_ids"])
        self.assertEqual(last[2]["output_ids"], self.generate(text="y", sampling_params=GREEDY)["output_ids"])

    def test_stop_strings_and_ids(self) -> None:
        free = self.generate(text="stop", sampling_params=GREEDY)
        stop_id = free["output_ids"][6]
        first = free["output_ids"].index(stop_id)
        params = {**GREEDY, "stop_token_ids": [stop_id]}
        stopped = self.generate(text="stop", sampling_params=params)
        self.assertEqual(stopped["output_ids"], free["output_ids"][: first + 1])
        self.assertEqual(stopped["meta_info"]["finish_reason"], {"type": "stop", "matched": stop_id})
        ascii_only = {**GREEDY, "logit_bias": {str(i): -100.0 for i in [*range(32), *range(127, 256)]}}
        free = self.generate(text="stop", sampling_params=ascii_only)
        stop = free["text"][5:8]
        whole = self.generate(text="stop", sampling_params={**ascii_only, "stop": stop})
        expected = free["text"][: free["text"].index(stop)]
        self.assertEqual(whole["text"], expected)
        self.assertEqual(whole["meta_info"]["finish_reason"], {"type": "stop", "matched": stop})
        events = self.stream("/generate", text="stop", sampling_params={**ascii_only, "stop": [stop, "~~~~"]})
        self.assertTrue(all(expected.startswith(event["text"]) for event in events))
        self.assertEqual(events[-1]["text"], expected)
        kept = self.generate(text="stop", sampling_params={**ascii_only, "stop": stop, "no_stop_trim": True})
        self.assertEqual(kept["text"], expected + stop)
        pattern = f"{re.escape(stop[:2])}[{re.escape(stop[2])}]"
        whole = self.generate(text="stop", sampling_params={**ascii_only, "stop_regex": pattern})
        self.assertEqual(whole["text"], expected + stop)
        self.assertEqual(whole["meta_info"]["finish_reason"], {"type": "stop", "matched": pattern})

    def test_streams_tell_logprobs_as_ids_come(self) -> None:
        body = {"text": "told", "sampling_params": GREEDY, "return_logprob": True, "logprob_start_len": 1}
        whole = self.generate(**body)["meta_info"]
        events = self.stream("/generate", **body, top_logprobs_num=1)
        for event in events:
            meta, ids = event["meta_info"], event["output_ids"]
            self.assertEqual([entry[1] for entry in meta["output_token_logprobs"]], ids)
            self.assertEqual(meta["output_token_logprobs_length"], len(ids))
            self.assertEqual([top[0] for top in meta["output_top_logprobs"]], meta["output_token_logprobs"])
            self.assertEqual([entry[1] for entry in meta["input_token_logprobs"]], list(b"old"))
        self.assertGreater(len(events), 3)
        last = [entry[0] for entry in events[-1]["meta_info"]["output_token_logprobs"]]
        for value, other in zip(last, whole["output_token_logprobs"], strict=True):
            self.assertAlmostEqual(value, other[0], places=4)

    def test_bad_words_do_not_come(self) -> None:
        """And what comes instead is the same whatever is drafted."""
        letters = {**GREEDY, "logit_bias": {str(i): -100.0 for i in range(256) if not 97 <= i <= 122}}
        free = self.generate(text="bad", sampling_params=letters)["text"]
        words = sorted({free[at : at + 2] for at in range(3, 20, 3)})
        texts = [
            self.generate(text="bad", sampling_params={**letters, "bad_words": words, **more})["text"]
            for more in ({}, {"speculative_draft_len": 0}, {"speculative_draft_len": 1})
        ]
        self.assertEqual(texts, [texts[0]] * 3)
        self.assertFalse(any(word in texts[0] for word in words))

    def test_a_thinking_budget_is_kept(self) -> None:
        params = {**GREEDY, "thinking_budget": 3}
        texts = [
            self.generate(text="hm", sampling_params={**params, **more}, require_reasoning=True)["output_ids"]
            for more in ({}, {"speculative_draft_len": 0})
        ]
        free = self.generate(text="hm", sampling_params=GREEDY)["output_ids"]
        self.assertEqual(texts[0], texts[1])
        self.assertEqual((texts[0][:3], bytes(texts[0][3:11])), (free[:3], b"</think>"))
        self.assertEqual(len(texts[0]), 24)

    def test_salts_keep_prefixes_apart(self) -> None:
        def cached(**fields: Any) -> int:
            found = self.generate(text="salted " * 20, sampling_params={"max_new_tokens": 1}, **fields)
            return int(found["meta_info"]["cached_tokens"])

        salts: list[dict[str, Any]] = [{"cache_salt": "a"}, {"extra_key": "a"}, {"cache_salt": "b"}]
        self.assertEqual([cached(**salt) for salt in salts], [0, 0, 0])
        self.assertTrue(all(cached(**salt) > 100 for salt in salts))

    def test_errors_name_the_problem(self) -> None:
        cases: list[tuple[dict[str, Any], str]] = [
            ({}, "text or input_ids"),
            ({"text": "a", "input_ids": [1]}, "text or input_ids"),
            ({"text": 3}, "text"),
            ({"text": []}, "text"),
            ({"text": ""}, "empty"),
            ({"input_ids": [1, "a"]}, "input_ids"),
            ({"input_ids": [256]}, "256"),
            ({"text": "a", "sampling_params": {"temperature": "hot"}}, "temperature"),
            ({"text": "a", "sampling_params": {"top_p": 0}}, "top_p"),
            ({"text": "a", "sampling_params": {"regex": 7}}, "regex must be text"),
            ({"text": "a", "require_reasoning": 1}, "require_reasoning must be true or false"),
            ({"text": "a", "sampling_params": [1]}, "sampling_params"),
            ({"text": "a", "stream": "yes"}, "stream"),
            ({"text": "a", "return_logprob": "yes"}, "return_logprob"),
            ({"text": "a", "return_hidden_states": True}, "--enable-return-hidden-states"),
            ({"text": "a", "image_data": "x"}, "image_data"),
            ({"text": "a", "lora_path": "x"}, "lora_path"),
        ]
        for body, word in cases:
            response = self.post("/generate", **body)
            self.assertEqual(response.status_code, 400, body)
            self.assertIn(word, response.json()["error"]["message"])
        self.generate(text="a", sampling_params=GREEDY, image_data=None, return_logprob=False, unknown_key=1)

    def test_too_long_says_both_numbers(self) -> None:
        response = self.post("/generate", input_ids=[65] * 5000)
        self.assertEqual(response.status_code, 400)
        self.assertIn("5000", response.json()["error"]["message"])
        self.assertIn("4096", response.json()["error"]["message"])
        response = self.post("/generate", text="abc", sampling_params={"max_new_tokens": 4094})
        self.assertEqual(response.status_code, 400)
        self.assertIn("4096", response.json()["error"]["message"])

    def test_bad_bodies(self) -> None:
        response = self.client.post("/generate", content="{", headers={"content-type": "application/json"})
        self.assertEqual(response.status_code, 400)
        self.assertEqual(self.client.post("/generate", content='{"text": "a"}').status_code, 400)
        self.assertEqual(self.client.post("/generate", json=[1]).status_code, 400)
        self.assertEqual(self.client.get("/nowhere").status_code, 404)
        self.assertEqual(self.client.get("/generate").status_code, 405)

    def test_client_that_goes_away_while_streaming(self) -> None:
        body = {"text": "long", "stream": True, "sampling_params": ENDLESS}
        with httpx.stream("POST", f"{self.server.url}/generate", json=body, timeout=30) as response:
            next(response.iter_lines())
        self.assertLess(self.wait_until_idle(), 2.0)

    def test_client_that_goes_away_while_it_waits(self) -> None:
        with self.assertRaises(httpx.ReadTimeout):
            body = {"text": ["long", "longer"], "sampling_params": {**ENDLESS, "n": 2}}
            httpx.post(f"{self.server.url}/generate", json=body, timeout=0.5)
        self.assertLess(self.wait_until_idle(), 2.0)

    def test_abort_request(self) -> None:
        for abort in ({"rid": "victim"}, {"abort_all": True}):
            answers: list[Any] = []
            body = {"text": "abort me", "rid": "victim", "sampling_params": {**ENDLESS, "n": 2}}
            thread = threading.Thread(target=lambda b=body, a=answers: a.append(self.post("/generate", **b)))
            thread.start()
            while self.server_state()["num_running_reqs"] == 0:
                time.sleep(0.02)
            self.assertEqual(self.post("/abort_request", **abort).status_code, 200)
            thread.join(5)
            samples = answers[0].json()
            self.assertEqual(answers[0].status_code, 200)
            self.assertEqual([s["meta_info"]["finish_reason"]["type"] for s in samples], ["abort", "abort"])
            self.assertEqual([s["meta_info"]["id"] for s in samples], ["victim_0", "victim_1"])
        self.assertEqual(self.post("/abort_request", rid="nobody").status_code, 200)
        self.assertEqual(self.post("/abort_request").status_code, 400)

    def test_a_rid_in_use_is_refused(self) -> None:
        body = {"text": "a", "rid": "twice", "stream": True, "sampling_params": ENDLESS}
        with self.client.stream("POST", "/generate", json=body) as response:
            lines = response.iter_lines()  # kept: dropping it closes the connection
            next(lines)
            refused = httpx.post(f"{self.server.url}/generate", json={**body, "stream": False}, timeout=30)
        self.assertEqual(refused.status_code, 400)
        self.assertIn("twice", refused.json()["error"]["message"])
        self.wait_until_idle()

    def test_cache_is_not_flushed_under_requests(self) -> None:
        body = {"text": "busy", "stream": True, "sampling_params": ENDLESS}
        with self.client.stream("POST", "/generate", json=body) as response:
            lines = response.iter_lines()  # kept: dropping it closes the connection
            next(lines)
            refused = httpx.post(f"{self.server.url}/flush_cache?timeout=0.2", timeout=30)
        self.assertEqual(refused.status_code, 400)
        self.assertEqual(self.client.get("/flush_cache?timeout=soon").status_code, 400)
        self.assertEqual(self.client.get("/flush_cache?timeout=10").status_code, 200)  # waits for the end
        self.wait_until_idle()
        self.assertEqual(self.client.get("/flush_cache").status_code, 200)

"""Whatever a client sends is answered with status 400 and says why. Run alone: pytest THIS_FILE"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

from helpers.server import ServerTestCase

ENDPOINTS = ("/generate", "/v1/completions", "/v1/chat/completions", "/abort_request", "/set_internal_state")
JSON = {"content-type": "application/json"}

NO_OBJECTS = (
    "", "null", "[]", "1", '"x"', "{", "nonsense", "[" * 100_000, '{"a":' * 5000 + "1" + "}" * 5000,
    '{"a": ' + "9" * 5000 + "}",
)  # fmt: skip

# JSON values that no field of the tables below takes.
VALUES = (
    "1.5", "-2", "1e999", "-1e999", "NaN", "9" * 4000, str(2**64),
    '"\\ud800"', '["\\ud800"]', '{"\\ud800": 1}', "[null, null]", "[[[]]]",
    '{"a": {"b": [1]}}', "[" * 500 + "]" * 500, f"[{'9' * 4000}]",
)  # fmt: skip
NATIVE_FIELDS = ("text", "input_ids", "stream", "return_logprob", "sampling_params")
SAMPLING_FIELDS = ("max_new_tokens", "top_p", "top_k", "min_p", "n", "stop_token_ids", "ignore_eos", "regex")
OPENAI_FIELDS = ("top_p", "top_k", "min_p", "max_tokens", "n", "stop_token_ids", "stream", "logprobs")


def bodies() -> Iterator[tuple[str, str]]:
    """(path, body), each of which is wrong in one place."""
    for value in VALUES:
        for field in NATIVE_FIELDS:
            rest = "" if field in ("text", "input_ids") else '"text": "a", '
            yield "/generate", f'{{{rest}"{field}": {value}}}'
        for field in SAMPLING_FIELDS:
            yield "/generate", f'{{"text": "a", "sampling_params": {{"{field}": {value}}}}}'
        for field in OPENAI_FIELDS:
            yield "/v1/completions", f'{{"prompt": "a", "{field}": {value}}}'
        yield "/v1/chat/completions", f'{{"messages": {value}}}'
        yield "/v1/chat/completions", f'{{"messages": [{{"role": "user", "content": {value}}}]}}'
        for state in (value, f'{{"speculative_disable_bs_threshold": {value}}}', f'{{"unknown": {value}}}'):
            yield "/set_internal_state", f'{{"server_args": {state}}}'


class TestBadBodies(ServerTestCase):
    def refused(self, path: str, body: str) -> str:
        """The message."""
        response = self.client.post(path, content=body, headers=JSON)
        self.assertEqual(response.status_code, 400, f"{path} {body[:120]}: {response.text[:300]}")
        answer = response.json()
        message: str = answer["message"] if path.startswith("/v1/") else answer["error"]["message"]
        self.assertTrue(message)
        self.assertLess(len(message), 2000)
        return message

    def tearDown(self) -> None:
        self.generate(text="a", sampling_params={"max_new_tokens": 1})
        self.assertNotIn("Traceback", self.server.log())

    def test_no_objects(self) -> None:
        for path in ENDPOINTS:
            for body in NO_OBJECTS:
                self.refused(path, body)

    def test_values_of_the_wrong_kind(self) -> None:
        for path, body in bodies():
            self.refused(path, body)

    def test_half_a_character_is_refused_wherever_it_is(self) -> None:
        for path, body in (
            ("/generate", '{"text": "a", "rid": "\\ud800"}'),
            ("/generate", '{"text": "a", "sampling_params": {"\\uDFFF": null}}'),
            ("/v1/completions", '{"prompt": "a", "model": "\\ud800"}'),
            ("/v1/chat/completions", '{"messages": [], "unknown": ["\\udc00"]}'),
            ("/abort_request", '{"rid": "\\ud800"}'),
        ):
            self.assertIn("surrogate", self.refused(path, body))
        sampling = {"max_new_tokens": 1}
        whole = json.dumps({"text": "\U0001f600", "sampling_params": sampling})  # a pair of escapes
        self.assertIn("\\ud83d\\ude00", whole)
        self.assertEqual(self.client.post("/generate", content=whole, headers=JSON).status_code, 200)

    def test_a_message_does_not_repeat_megabytes(self) -> None:
        for value in ('"' + "x" * 1_000_000 + '"', "[" + "1.5," * 10_000 + "1.5]"):
            self.refused("/generate", f'{{"text": "a", "sampling_params": {value}}}')
            self.refused("/v1/completions", f'{{"prompt": "a", "stop_token_ids": {value}}}')
            self.refused("/set_internal_state", f'{{"server_args": {{"a": 1, "b": {value}}}}}')

    def test_a_million_mistakes_do_not_keep_others_waiting(self) -> None:
        nulls = "[" + "null," * 1_000_000 + "null]"
        biases = json.dumps({str(i): None for i in range(300_000)})
        for path, body in (
            ("/generate", f'{{"text": {nulls}}}'),
            ("/generate", f'{{"input_ids": {nulls}}}'),
            ("/v1/completions", f'{{"prompt": {nulls}}}'),
            ("/v1/completions", f'{{"prompt": "a", "stop": {nulls}}}'),
            ("/v1/completions", f'{{"prompt": "a", "logit_bias": {biases}}}'),
            ("/v1/chat/completions", f'{{"messages": {nulls}}}'),
        ):
            began = time.monotonic()
            self.refused(path, body)
            self.assertLess(time.monotonic() - began, 3.0, path)

    def test_what_curl_sends_without_a_header(self) -> None:
        for path in ENDPOINTS:
            form = {"content-type": "application/x-www-form-urlencoded"}
            response = self.client.post(path, content="{}", headers=form)
            self.assertEqual(response.status_code, 400)
            self.assertIn("Content-Type: application/json", response.text)

"""A request that does not fit is refused in words and by a code that clients know. Run alone: pytest FILE"""

from __future__ import annotations

from typing import Any

import pytest
from helpers.chat_desk import URL, ChatDesk
from hypothesis import given, settings
from hypothesis import strategies as st

CONTEXT = 4096  # of the desk
USER = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> ChatDesk:
    made = ChatDesk(tmp_path_factory.mktemp("desk"))
    made.pieces = ["x"]
    return made


def bodies(num_ids: int, num_new: int) -> list[tuple[str, dict[str, Any]]]:
    ids = [1] * num_ids
    return [
        ("/v1/completions", {"prompt": ids, "max_tokens": num_new}),
        (URL, {"messages": [], "input_ids": ids, "max_tokens": num_new}),
        ("/generate", {"input_ids": ids, "sampling_params": {"max_new_tokens": num_new}}),
    ]


@settings(max_examples=30)
@given(st.integers(1, 2 * CONTEXT), st.integers(1, 2 * CONTEXT))
def test_the_numbers_and_the_limit_are_told(desk: ChatDesk, num_ids: int, num_new: int) -> None:
    for path, body in bodies(num_ids, num_new):
        answer = desk.post(path, body)
        if num_ids + num_new <= CONTEXT:
            assert answer.status_code == 200
            continue
        told = answer.json()
        message = told["message"] if path.startswith("/v1") else told["error"]["message"]
        assert answer.status_code == 400
        assert message.startswith(f"This model's maximum context length is {CONTEXT} tokens")
        assert f" {num_ids} " in message
        if path.startswith("/v1"):
            assert (told["object"], told["code"]) == ("error", "context_length_exceeded")


def test_a_stream_and_responses_say_it_too(desk: ChatDesk) -> None:
    for stream in (False, True):
        answer = desk.post(URL, {"messages": USER, "max_tokens": 5000, "stream": stream})
        assert (answer.status_code, answer.json()["code"]) == (400, "context_length_exceeded")
    answer = desk.post("/v1/responses", {"input": "Hello", "max_output_tokens": 5000})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    other = desk.post(URL, {"messages": USER, "temperature": -1})
    assert (other.status_code, other.json()["code"]) == (400, 400)

"""Log-probabilities of OpenAI's endpoints, whole and streamed. Run alone: pytest THIS_FILE"""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers.chat_desk import ChatDesk
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang.srt.managers.io_struct import FinishReason

PIECES = st.lists(st.text("ab é東\U0001f600\n", min_size=1, max_size=6), min_size=1, max_size=5)
SETTINGS = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> ChatDesk:
    desk = ChatDesk(tmp_path_factory.mktemp("kimi"), reasoning_parser="kimi_k2")
    desk.finish = FinishReason("length", length=9)
    return desk


def ids_of(desk: ChatDesk, pieces: list[str]) -> list[int]:
    return [token for piece in pieces for token in desk.tokenizer.encode(piece)]


def complete(desk: ChatDesk, pieces: list[str], **body: Any) -> list[dict[str, Any]]:
    """The choices of a completion, or of all events of one."""
    desk.pieces = pieces
    response = desk.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        return [response.json()["choices"][0]]
    lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line][:-1]
    return [choice for line in lines for choice in json.loads(line)["choices"]]


@SETTINGS
@given(pieces=PIECES, num_top=st.integers(0, 2))
def test_chat(desk: ChatDesk, pieces: list[str], num_top: int) -> None:
    """The reasoning's ids are told too: joined, the tokens' bytes are all that the model has written."""
    asked: dict[str, Any] = {"logprobs": True, "top_logprobs": num_top}
    events = desk.stream(pieces, **asked)
    told = [c["logprobs"] for event in events for c in event["choices"] if c["logprobs"] is not None]
    content = [token for part in told for token in part["content"]]
    ids = ids_of(desk, pieces)
    assert [token["logprob"] for token in content] == [-float(i) for i in ids]
    assert b"".join(bytes(token["bytes"]) for token in content) == "".join(pieces).encode()
    for token, token_id in zip(content, ids, strict=True):
        assert token["token"] == desk.tokenizer.token_text(token_id)
        assert [top["logprob"] for top in token["top_logprobs"]] == [
            -float(token_id + n) for n in range(num_top)
        ]
    whole = desk.chat(["".join(pieces)], **asked)["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(token["bytes"]) for token in whole) == "".join(pieces).encode()
    assert desk.chat(pieces)["choices"][0]["logprobs"] is None


@SETTINGS
@given(
    pieces=PIECES, prompt=st.text("xy é東", min_size=1, max_size=6), echo=st.booleans(), stream=st.booleans()
)
def test_completions_say_where_tokens_lie_in_the_text(
    desk: ChatDesk, pieces: list[str], prompt: str, echo: bool, stream: bool
) -> None:
    choices = complete(desk, pieces, prompt=prompt, logprobs=1, echo=echo, stream=stream)
    text = "".join(choice["text"] for choice in choices)
    told = [choice["logprobs"] for choice in choices if choice["logprobs"] is not None]
    tokens, offsets, logprobs, tops = (
        [value for part in told for value in part[name]]
        for name in ("tokens", "text_offset", "token_logprobs", "top_logprobs")
    )
    pieces = pieces if stream else ["".join(pieces)]
    ids = [*(desk.tokenizer.encode(prompt) if echo else []), *ids_of(desk, pieces)]
    assert text == (prompt if echo else "") + "".join(pieces)
    assert logprobs == [None if echo and at == 0 else -float(i) for at, i in enumerate(ids)]
    assert len(tops) == len(ids) and offsets == sorted(offsets)
    for at, (token, offset, token_id) in enumerate(zip(tokens, offsets, ids, strict=True)):
        assert token == desk.tokenizer.token_text(token_id)
        assert tops[at] == (None if echo and at == 0 else {token: -float(token_id)})
        if "\ufffd" not in token:
            assert text[offset : offset + len(token)] == token


def test_no_likeliest_ones(desk: ChatDesk) -> None:
    for echo in (False, True):
        logprobs = complete(desk, ["ab"], prompt="xy", logprobs=0, echo=echo)[0]["logprobs"]
        assert logprobs["top_logprobs"] is None
        assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == (4 if echo else 2)
    for off in (None, False):
        assert complete(desk, ["ab"], prompt="x", logprobs=off)[0]["logprobs"] is None


@pytest.mark.parametrize("wanted", [True, "last"])
def test_the_last_hidden_state(desk: ChatDesk, wanted: bool | str) -> None:
    pieces = ["a", "b"]
    last = ids_of(desk, pieces)[-1]
    whole = desk.chat(["b"], return_hidden_states=wanted)["choices"][0]
    assert whole["hidden_states"] == [last, 0.5] and whole["logprobs"] is None
    events = [c for event in desk.stream(pieces, return_hidden_states=wanted) for c in event["choices"]]
    assert [c["delta"]["hidden_states"] for c in events if "hidden_states" in c["delta"]] == [[last, 0.5]]
    assert all(c["logprobs"] is None for c in events) and events[-1]["finish_reason"] == "length"
    for stream in (False, True):
        choices = complete(desk, pieces, prompt="x", return_hidden_states=wanted, stream=stream)
        told = [choice["hidden_states"] for choice in choices if "hidden_states" in choice]
        assert len(told) == 1 and told[0][1] == 0.5
    assert "hidden_states" not in desk.chat(["b"])["choices"][0]


def test_what_is_refused(desk: ChatDesk) -> None:
    assert "top_logprobs is for requests with logprobs: true" in desk.refused(top_logprobs=2)
    assert "top_logprobs must be from 0" in desk.refused(logprobs=True, top_logprobs=-1)
    for wrong, words in ((True, "logprobs must be a number"), (9999, "logprobs must be from 0")):
        response = desk.post("/v1/completions", {"prompt": "x", "logprobs": wrong})
        assert response.status_code == 400 and words in response.json()["message"]

"""Anthropic's messages: what its client makes of known replies and refusals. Run alone: pytest THIS_FILE"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anthropic
import pytest
from helpers.chat_desk import ChatDesk
from helpers.tool_texts import CUTS, WRITERS, Call, pieces_of
from hypothesis import HealthCheck, given, settings

from sglang.srt.managers.io_struct import FinishReason

CALLS: list[Call] = [("get-weather", {"town": "東京", "days": 3}), ("list", {})]
TOOLS: Any = [{"name": name, "description": "x", "input_schema": {"type": "object"}} for name, _ in CALLS]
TEXT = f"I look.</think>Well. {WRITERS['kimi_k2'](CALLS)}"
ASKED: Any = {"model": "m", "max_tokens": 99, "messages": [{"role": "user", "content": "Hello"}]}
KEY = "a-key"


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> ChatDesk:
    folder = tmp_path_factory.mktemp("kimi")
    return ChatDesk(folder, tool_call_parser="kimi_k2", reasoning_parser="kimi_k2", api_key=KEY)


def client_of(desk: ChatDesk, key: str = KEY) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(
        base_url="http://desk", api_key=key, max_retries=0, http_client=desk.client()
    )


def whole(desk: ChatDesk, pieces: list[str], **body: Any) -> anthropic.types.Message:
    async def ask() -> anthropic.types.Message:
        async with client_of(desk) as client:
            return await client.messages.create(**ASKED, **body)

    desk.pieces = pieces
    return desk.run(ask())


def streamed(desk: ChatDesk, pieces: list[str], **body: Any) -> tuple[anthropic.types.Message, list[Any]]:
    """The message as the client puts it together, and the events."""

    async def ask() -> tuple[anthropic.types.Message, list[Any]]:
        async with client_of(desk) as client, client.messages.stream(**ASKED, **body) as stream:
            events = [event async for event in stream]
            return await stream.get_final_message(), events

    desk.pieces = pieces
    return desk.run(ask())


def blocks(message: Any) -> list[dict[str, Any]]:
    """Ids of calls are the model's here; those made up would differ."""
    return [block.model_dump(exclude_none=True) for block in message.content]


def test_whole(desk: ChatDesk) -> None:
    message = whole(desk, [TEXT], tools=TOOLS)
    assert blocks(message) == [
        {"type": "thinking", "thinking": "I look.", "signature": ""},
        {"type": "text", "text": "Well."},
        {"type": "tool_use", "id": "functions.get-weather:0", "name": "get-weather", "input": CALLS[0][1]},
        {"type": "tool_use", "id": "functions.list:1", "name": "list", "input": {}},
    ]
    assert (message.stop_reason, message.stop_sequence) == ("tool_use", None)
    assert message.id.startswith("msg_") and desk.sent[-1].rid == message.id  # so /abort_request takes it


def test_a_budget_for_thinking_is_the_requests(desk: ChatDesk) -> None:
    for kind, expected in (("enabled", 7), ("adaptive", 7), ("disabled", None)):
        whole(desk, ["a"], extra_body={"thinking": {"type": kind, "budget_tokens": 7}})
        assert desk.sent[-1].sampling.thinking_budget == expected


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=CUTS)
def test_streamed_in_any_pieces(desk: ChatDesk, cuts: list[int]) -> None:
    message, events = streamed(desk, pieces_of(TEXT, cuts), tools=TOOLS)
    complete = whole(desk, [TEXT], tools=TOOLS)
    assert blocks(message) == blocks(complete)
    assert message.stop_reason == complete.stop_reason
    assert message.usage.input_tokens == complete.usage.input_tokens
    assert message.usage.output_tokens == sum(len(desk.tokenizer.encode(p)) for p in pieces_of(TEXT, cuts))
    kinds = [event.type for event in events if event.type in ("content_block_start", "content_block_stop")]
    assert kinds == ["content_block_start", "content_block_stop"] * 4  # one at a time
    indices = [event.index for event in events if event.type == "content_block_start"]
    assert indices == [0, 1, 2, 3]
    assert [events[0].type, events[-1].type] == ["message_start", "message_stop"]


@pytest.mark.parametrize(
    "finish, reason, sequence",
    [
        (FinishReason("stop", matched=7), "end_turn", None),
        (FinishReason("stop", matched="END"), "stop_sequence", "END"),
        (FinishReason("length", length=3), "max_tokens", None),
    ],
)
def test_how_it_ended(tmp_path: Path, finish: FinishReason, reason: str, sequence: str | None) -> None:
    desk = ChatDesk(tmp_path, api_key=KEY)
    desk.finish = finish
    for message in (whole(desk, ["a", "b"]), streamed(desk, ["a", "b"])[0]):
        assert (message.stop_reason, message.stop_sequence) == (reason, sequence)
        assert blocks(message) == [{"type": "text", "text": "ab"}]


@pytest.mark.parametrize(
    "method, path, body, status, kind",
    [
        ("GET", "/v1/messages", None, 405, "invalid_request_error"),
        ("POST", "/v1/messages/nothing", {}, 404, "not_found_error"),
        ("POST", "/v1/messages", {"x": "y" * 1_100_000}, 413, "request_too_large"),
        ("POST", "/v1/messages", ASKED, 503, "overloaded_error"),
        ("POST", "/v1/messages", {**ASKED, "stream": True}, 503, "overloaded_error"),
    ],
)
def test_refusals_have_their_shape_wherever_they_come_from(
    tmp_path: Path, method: str, path: str, body: Any, status: int, kind: str
) -> None:
    desk = ChatDesk(tmp_path, max_request_body_mb=1)
    desk.manager.closing = "the server is shutting down"
    answer = desk.ask(method, path, body)
    assert answer.status_code == status
    error = answer.json()
    assert error["type"] == "error" and error["error"]["type"] == kind and error["error"]["message"]
    assert ("retry-after" in answer.headers) == (status == 503)


def test_a_wrong_key(desk: ChatDesk) -> None:
    async def ask() -> None:
        async with client_of(desk, "another") as client:
            await client.messages.create(**ASKED)

    with pytest.raises(anthropic.AuthenticationError) as caught:
        desk.run(ask())
    assert caught.value.type == "authentication_error"

"""Bodies of chats that are wrong somewhere deep: refused, never a failure. Run alone: pytest THIS_FILE"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.chat_desk import ChatDesk
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {}}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
CHAT: Any = {
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {"role": "assistant", "content": "y", "reasoning_content": "z", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "r"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "stream_options": {"include_usage": True},
}
MESSAGES: Any = {
    "max_tokens": 5,
    "system": [{"type": "text", "text": "s"}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "z", "signature": ""},
                {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "r"}]}
            ],
        },
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "tool", "name": "f"},
    "thinking": {"type": "enabled"},
    "stop_sequences": ["q"],
    "metadata": {"user_id": "u"},
}
RESPONSES: Any = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "z"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "y"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": "r"},
    ],
    "instructions": "s",
    "tools": [{"type": "function", **FUNCTION, "strict": True}],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
    "text": {"format": {"type": "text"}, "verbosity": "medium"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "metadata": {"a": "b"},
}
BODIES = {"/v1/chat/completions": CHAT, "/v1/messages": MESSAGES, "/v1/responses": RESPONSES}
JUNK = st.sampled_from(
    [None, True, 0, -1, 1.5, 2**70, "", "x", "auto", [], [[]], [{}], ["x"], {}, {"type": []}, {"name": {}}]
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from places(item, (*path, key))


def changed(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    made = inner = copy.deepcopy(body)
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return made


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> ChatDesk:
    desk = ChatDesk(tmp_path_factory.mktemp("d"), tool_call_parser="kimi_k2", reasoning_parser="kimi_k2")
    desk.pieces = ["a"]
    return desk


@pytest.mark.parametrize("path", BODIES)
def test_as_it_is_the_body_is_served(desk: ChatDesk, path: str) -> None:
    answer = desk.post(path, BODIES[path])
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", BODIES)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_one_wrong_place(desk: ChatDesk, path: str, data: st.DataObject) -> None:
    """What is no refusal is an answer; a failure would be raised here."""
    place = data.draw(st.sampled_from(list(places(BODIES[path]))))
    answer = desk.post(path, changed(BODIES[path], place, data.draw(JUNK)))
    assert answer.status_code in (200, 400, 404), answer.text

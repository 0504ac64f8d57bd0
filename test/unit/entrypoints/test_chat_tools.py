"""Tools and reasoning through the chat endpoint, whole and streamed. Run alone: pytest THIS_FILE"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from helpers.chat_desk import ChatDesk, message_of
from helpers.tool_texts import CUTS, WRITERS, Call, pieces_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang.srt.configs.parser_args import REASONING_PARSERS, TOOL_CALL_PARSERS
from sglang.srt.function_call.registry import TOOL_FORMATS
from sglang.srt.managers.io_struct import FinishReason
from sglang.srt.parser.reasoning import REASONING_FORMATS

CALLS: list[Call] = [("get-weather", {"town": "東京", "days": 3}), ("list", {"path": "/"})]
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "x", "parameters": {"type": "object"}}}
    for name, _ in CALLS
]
TEXT = f"I look.</think>Well. {WRITERS['kimi_k2'](CALLS)}"


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> ChatDesk:
    folder = tmp_path_factory.mktemp("kimi")
    return ChatDesk(folder, tool_call_parser="kimi_k2", reasoning_parser="kimi_k2")


def calls_of(message: dict[str, Any]) -> list[Call]:
    functions = [call["function"] for call in message["tool_calls"] or []]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


def test_the_names_on_the_command_line_are_those_of_the_parsers() -> None:
    assert tuple(TOOL_FORMATS) == TOOL_CALL_PARSERS and tuple(REASONING_FORMATS) == REASONING_PARSERS


def test_whole(desk: ChatDesk) -> None:
    answer = desk.chat([TEXT], tools=TOOLS)
    choice = answer["choices"][0]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("I look.", "Well.")
    assert calls_of(message) == CALLS
    assert [call["id"] for call in message["tool_calls"]] == ["functions.get-weather:0", "functions.list:1"]
    assert {call["type"] for call in message["tool_calls"]} == {"function"}
    assert choice["finish_reason"] == "tool_calls"
    thought = len(desk.tokenizer.encode("I look.</think>"))
    assert answer["usage"]["reasoning_tokens"] == thought
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": thought}
    assert "namespace functions {" in desk.prompt() and desk.prompt().endswith("<think>")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=CUTS, n=st.integers(1, 2))
def test_streamed_in_any_pieces(desk: ChatDesk, cuts: list[int], n: int) -> None:
    """Several marks in one piece, marks in several; the index and the name of each call are there."""
    whole = desk.chat([TEXT], tools=TOOLS, n=n)
    events = desk.stream(pieces_of(TEXT, cuts), tools=TOOLS, n=n, stream_options={"include_usage": True})
    for index in range(n):
        assert message_of(events, index) == whole["choices"][index]["message"]
        last = [choice for event in events for choice in event["choices"] if choice["index"] == index][-1]
        assert (last["finish_reason"], last["delta"]) == ("tool_calls", {})
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] > 0


def test_arguments_are_streamed(desk: ChatDesk) -> None:
    events = desk.stream(list(TEXT), tools=TOOLS)
    parts = [p for e in events for c in e["choices"] for p in c["delta"].get("tool_calls", [])]
    assert [p["function"].get("name") for p in parts if "id" in p] == ["get-weather", "list"]
    assert len([p for p in parts if p["index"] == 0]) > 10


def test_a_reply_that_is_cut_off_is_not_one_of_calls(desk: ChatDesk) -> None:
    desk.finish, before = FinishReason("length", length=9), desk.finish
    try:
        choice = desk.chat([TEXT[:-60]], tools=TOOLS)["choices"][0]
    finally:
        desk.finish = before
    assert choice["finish_reason"] == "length" and choice["message"]["tool_calls"]


def test_without_tools_marks_are_text(desk: ChatDesk) -> None:
    for body in ({}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = desk.chat([TEXT], **body)["choices"][0]
        assert choice["message"]["tool_calls"] is None and choice["finish_reason"] == "stop"
        assert choice["message"]["content"] == TEXT.partition("</think>")[2]
        assert "namespace" not in desk.prompt()


def test_reasoning_as_wanted(desk: ChatDesk) -> None:
    plain = desk.chat(["It is.</think>Yes."], separate_reasoning=False)["choices"][0]["message"]
    assert (plain["content"], plain["reasoning_content"]) == ("It is.</think>Yes.", None)
    off = desk.chat(["Yes."], chat_template_kwargs={"thinking": False})
    assert off["choices"][0]["message"]["content"] == "Yes." and off["usage"]["reasoning_tokens"] == 0
    assert desk.prompt().endswith("<think></think>")
    held = desk.stream(list("It is.</think>Yes."), stream_reasoning=False)
    deltas = [choice["delta"] for event in held for choice in event["choices"]]
    assert [d["reasoning_content"] for d in deltas if "reasoning_content" in d] == ["It is."]
    begun = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "It is.</think>Ye"}]
    more = desk.chat(["s."], messages=begun, continue_final_message=True)["choices"][0]["message"]
    assert (more["content"], more["reasoning_content"]) == ("s.", None)
    ids = desk.tokenizer.encode("<|im_middle|><think>")
    by_ids = desk.chat(["It is.</think>Yes."], messages=[], input_ids=ids)["choices"][0]["message"]
    assert (by_ids["content"], by_ids["reasoning_content"]) == ("Yes.", "It is.")


def test_one_call_at_a_time(desk: ChatDesk) -> None:
    message = desk.chat([TEXT], tools=TOOLS, parallel_tool_calls=False)["choices"][0]["message"]
    assert calls_of(message) == CALLS[:1]


NAMED = {"type": "function", "function": {"name": "list"}}


@pytest.mark.parametrize("choice,calls", [("required", CALLS), (NAMED, CALLS[1:])])
@pytest.mark.parametrize("parallel", [True, False])
def test_calls_that_must_be_made(desk: ChatDesk, choice: Any, calls: list[Call], parallel: bool) -> None:
    """By a grammar that begins after the reasoning; the reply is read as that, not in the model's format."""
    calls = calls if parallel else calls[:1]
    text = f"I look.</think>{WRITERS['forced'](calls)}"
    body = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": parallel}
    whole = desk.chat([text], **body)["choices"][0]
    assert (calls_of(whole["message"]), whole["message"]["content"]) == (calls, None)
    assert (whole["message"]["reasoning_content"], whole["finish_reason"]) == ("I look.", "tool_calls")
    sent = desk.sent[-1]
    assert sent.reasoning_end is not None and "namespace functions {" in desk.prompt()
    schema = json.loads(sent.sampling.json_schema or "")
    named = [item["properties"]["name"]["const"] for item in schema["items"]["anyOf"]]
    assert named == (["list"] if choice is NAMED else ["get-weather", "list"])
    assert ("maxItems" in schema) is (choice is NAMED or not parallel)
    assert calls_of(message_of(desk.stream(list(text), **body))) == calls


def test_calls_in_the_history_reach_the_template(tmp_path: Path) -> None:
    """Clients send arguments as JSON text and no content; templates want objects, and a text."""
    glm = ChatDesk(tmp_path, "glm.jinja", tool_call_parser="glm47", reasoning_parser="glm45")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"k": "v", "n": 2}'}}
    history = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "done"}]},
    ]
    reply = f"So.{WRITERS['glm47']([('get-weather', {'town': 'B'})])}"
    answer = glm.chat([reply], messages=history, tools=TOOLS)
    prompt = glm.prompt()
    assert "<think>Hm.</think><tool_call>f<arg_key>k</arg_key>\n<arg_value>v</arg_value>" in prompt.replace(
        "\n<tool_call>", "<tool_call>"
    )
    assert "<arg_value>2</arg_value>" in prompt and "<tool_response>done</tool_response>" in prompt
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("So.", None)
    assert calls_of(message) == [("get-weather", {"town": "B"})]
    off = glm.chat(["Yes."], chat_template_kwargs={"enable_thinking": False})
    assert off["choices"][0]["message"]["content"] == "Yes." and glm.prompt().endswith("</think>")


def test_marks_that_are_special_tokens_are_asked_for(tmp_path: Path) -> None:
    harmony = ChatDesk(tmp_path / "harmony", reasoning_parser="gpt-oss", tool_call_parser="gpt-oss")
    harmony.chat(["x"])
    assert not harmony.sent[-1].sampling.skip_special_tokens
    llama = ChatDesk(tmp_path, tool_call_parser="llama3")
    for body, shown in (
        ({"tools": TOOLS}, True),
        ({}, False),
        ({"tools": TOOLS, "skip_special_tokens": True}, False),
    ):
        llama.chat(["x"], **body)
        assert llama.sent[-1].sampling.skip_special_tokens is not shown
    call = f"<|python_tag|>{WRITERS['llama3'](CALLS)}"
    assert calls_of(llama.chat([call], tools=TOOLS)["choices"][0]["message"]) == CALLS


def test_a_server_without_parsers_gives_the_text(tmp_path: Path) -> None:
    plain = ChatDesk(tmp_path)
    message = plain.chat([TEXT], tools=TOOLS)["choices"][0]["message"]
    assert (message["content"], message["tool_calls"], message["reasoning_content"]) == (TEXT, None, None)
    assert "namespace functions {" in plain.prompt()


@pytest.mark.parametrize(
    "body,words",
    [
        ({"tools": [{"type": "function"}]}, r"tools\[0\] must be"),
        ({"tools": [{"type": "other", "function": {"name": "f"}}]}, r"tools\[0\] must be"),
        ({"tools": [{"function": {"name": ""}}]}, "name must be a string"),
        ({"tools": [{"function": {"name": "f", "parameters": []}}]}, "must be a JSON schema"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, 'tool_choice must be "auto"'),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, 'tool_choice must be "auto"'),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "names 'g'"),
        ({"tool_choice": "required"}, "needs tools"),
        ({"tools": TOOLS, "tool_choice": "required", "regex": "a"}, "and regex for another reply"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": 7}]}]}, "a function with a name"),
    ],
)
def test_refused(desk: ChatDesk, body: dict[str, Any], words: str) -> None:
    assert re.search(words, desk.refused(**body))


def test_a_template_that_takes_no_tools(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    desk = ChatDesk(tmp_path / "plain", "plain.jinja")
    assert "takes no tools" in desk.refused(tools=TOOLS)


def test_the_parsers_alone(desk: ChatDesk) -> None:
    parsed = desk.post(
        "/parse_function_call", {"text": TEXT, "tools": TOOLS, "tool_call_parser": "kimi_k2"}
    ).json()
    assert parsed["normal_text"] == "I look.</think>Well."
    assert [(c["tool_index"], c["name"], json.loads(c["parameters"])) for c in parsed["calls"]] == [
        (number, *call) for number, call in enumerate(CALLS)
    ]
    for text in ("I see.</think>\n\nYes.", "<think>I see.</think>Yes."):
        split = desk.post("/separate_reasoning", {"text": text, "reasoning_parser": "qwen3"}).json()
        assert split == {"reasoning_text": "I see.", "text": "Yes."}
    for path, body in (
        ("/parse_function_call", {"text": "x", "tool_call_parser": "none"}),
        ("/parse_function_call", {"text": "x", "tool_call_parser": "qwen", "tools": {"f": 1}}),
        ("/separate_reasoning", {"text": 7, "reasoning_parser": "qwen3"}),
        ("/separate_reasoning", []),
    ):
        response = desk.post(path, body)  # type: ignore[arg-type]
        assert response.status_code == 400 and response.json()["error"]["message"]

"""Calls come out as written, in any pieces, and nothing else is lost. Run alone: pytest THIS_FILE"""

from __future__ import annotations

import re
from typing import Any

import pytest
from helpers.tool_texts import CALLS, CUTS, JUNK, TOOLS, WRITERS, Call, Reply, joined, pieces_of
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sglang.srt.function_call.registry import FORCED
from sglang.srt.function_call.registry import TOOL_FORMATS as NAMED
from sglang.srt.function_call.tools import Tools

TOOL_FORMATS = {**NAMED, "forced": FORCED}
SECTION_MARKS = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
SECTION_MARKS += ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<|python_start|>", "<|python_end|>")
SECTION_MARKS += ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>")


def parse(name: str, pieces: list[str], tools: Tools = TOOLS) -> Reply:
    parser = TOOL_FORMATS[name].parser(tools)
    events = [event for piece in pieces for event in parser.push(piece)]
    return joined([*events, *parser.finish()])


def writable(name: str, calls: list[Call]) -> bool:
    """Python's identifiers have no dash; GLM's values can't hold their own end."""
    return name != "pythonic" or all("-" not in call[0] for call in calls)


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=25, deadline=None)
@given(calls=CALLS, cuts=CUTS, before=st.sampled_from(["", "Let me see.", "\n\n", "a { b [ c < d"]))
def test_calls_come_out_as_written(name: str, calls: list[Call], cuts: list[int], before: str) -> None:
    if not writable(name, calls) or (name in ("llama3", "forced") and before.strip()):
        return
    text = f"{before}\n{WRITERS[name](calls)}\n"
    for pieces in ([text], pieces_of(text, cuts)):
        reply = parse(name, pieces)
        assert reply.calls == calls
        assert reply.text == before.rstrip()


@pytest.mark.parametrize("name", sorted({*TOOL_FORMATS} - {"glm", "glm47", "hermes", "qwen"}))
@settings(max_examples=50, deadline=None)
@given(parts=st.lists(st.sampled_from(JUNK), max_size=14), cuts=CUTS)
@example(parts=["<tool_call>", '{"name": "get_weather", "arguments": {', "</tool_call>", "x"], cuts=[3])
def test_the_same_in_any_pieces_and_nothing_lost(name: str, parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    whole = parse(name, [text])
    assert parse(name, pieces_of(text, cuts)) == whole == parse(name, list(text))
    if not whole.names:
        for mark in SECTION_MARKS:
            text, whole.text = text.replace(mark, ""), whole.text.replace(mark, "")
        assert whole.text == text
    else:  # every word is somewhere
        found = whole.text + "".join([*whole.names, *whole.arguments])
        assert all(found.count(letter) >= text.count(letter) for letter in "é🙂")


# Says whom a message of GPT-OSS is for and what it is written in; what else stands there is for no one.
HEADER = re.compile(
    r"(<\|start\|>assistant[^<]*)?<\|channel\|>[^<]*(<\|constrain\|>[^<]*)?<\|message\|>",
)
BREAKS = st.lists(
    st.tuples(st.integers(0, 300), st.integers(0, 12), st.sampled_from(["", *JUNK])), max_size=4
)


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=30, deadline=None)
@given(calls=CALLS, breaks=BREAKS, cuts=CUTS)
@example(calls=[("get_weather", {})], breaks=[(300, 0, "\n```")], cuts=[])  # blanks behind the last call
@example(calls=[("get_weather", {})], breaks=[(60, 0, "é🙂")], cuts=[])  # in a header
def test_broken_calls_are_the_same_in_any_pieces(
    name: str, calls: list[Call], breaks: list[tuple[int, int, str]], cuts: list[int]
) -> None:
    text = WRITERS[name](calls)
    for at, length, junk in breaks:
        text = text[:at] + junk + text[at + length :]
    whole = parse(name, [text])
    assert parse(name, pieces_of(text, cuts)) == whole == parse(name, list(text))
    found, text = whole.text + "".join([*whole.names, *whole.arguments]), HEADER.sub("", text)
    assert all(found.count(letter) >= text.count(letter) for letter in "🙂日")


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_text_without_calls_is_a_text(name: str) -> None:
    text = "  if a < b and x[0] > {1}:\n    f(<tool>)\n\n"
    assert parse(name, list(text)) == Reply(text=text)


LONG = {"path": "x" * 300}


@pytest.mark.parametrize("name", sorted({*WRITERS} - {"pythonic"}))
def test_arguments_come_while_they_are_written(name: str) -> None:
    """Not when the call is complete: a client shows a file as it is written."""
    text = WRITERS[name]([("list-files", LONG)])
    parser = TOOL_FORMATS[name].parser(TOOLS)
    seen = joined(event for letter in text[: text.index("xxx") + 150] for event in parser.push(letter))
    assert seen.names == ["list-files"] and seen.arguments[0].count("x") >= 145


@pytest.mark.parametrize("name", sorted({*WRITERS} - {"pythonic"}))
def test_a_call_that_is_cut_off_keeps_what_there_was(name: str) -> None:
    """As with a limit of tokens: the arguments are no JSON then."""
    text = WRITERS[name]([("list-files", LONG)])
    reply = parse(name, [text[: text.index("xxx") + 150]])
    assert reply.names == ["list-files"] and reply.arguments[0].count("x") == 150


# ---- what the formats' models do beside the rule


def one(name: str, text: str, tools: Tools = TOOLS) -> tuple[str, list[Call]]:
    reply = parse(name, [text], tools)
    return reply.text, reply.calls


def test_hermes() -> None:
    call = ("get_weather", {"town": "</tool_call>"})
    swapped = '<tool_call>{"arguments": {"town": "</tool_call>"}, "name": "get_weather"}</tool_call>!'
    assert one("qwen25", swapped) == ("!", [call])
    assert one("qwen25", '<tool_call>{"name": "ns.run"}</tool_call>') == ("", [("ns.run", {})])
    in_string = '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>'
    assert one("qwen25", in_string) == ("", [("f", {"a": 1})])
    lacks_brace = '<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call>'
    more_keys = '<tool_call>{"name": "f", "arguments": {"a": 1}, "id": "x", "index": 2}</tool_call>'
    lacks_end = '<tool_call>{"name": "f", "arguments": {"a": 1}}'
    for text in (lacks_brace, more_keys, lacks_end):
        assert one("qwen25", text) == ("", [("f", {"a": 1})])
    assert one("qwen25", lacks_end * 2)[1] == [("f", {"a": 1})] * 2
    for text in (
        "<tool_call>\nget weather\n</tool_call>",
        '<tool_call>{"name": 7, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {"x": 1e999}, "name": "f"}</tool_call>',
        '<tool_call>{"arguments": {"x": }, "name": "f"}</tool_call>',
    ):
        assert one("qwen25", text + "é") == (text + "é", [])


def test_values_that_can_not_be_sent_as_they_are() -> None:
    text = '<tool_call>{"arguments": {"a": "\\ud800"}, "name": "f"}</tool_call>'
    reply = parse("qwen25", [text])
    assert reply.calls == [("f", {"a": "\ud800"})]
    reply.arguments[0].encode()


def test_llama3() -> None:
    call = ("get_weather", {"town": "B"})
    text = '{"name": "get_weather", "parameters": {"town": "B"}}'
    assert one("llama3", text) == one("llama3", f"<|python_tag|>{text}") == ("", [call])
    assert one("llama3", f"{text}; {text}\n{text}") == ("", [call] * 3)
    assert one("llama3", f"Here: {text}") == (f"Here: {text}", [])
    assert one("llama3", f"Here: <|python_tag|>{text};{text}") == ("Here:", [call] * 2)
    other = '{"name": "Ada", "parameters": {"age": 36}}'
    assert one("llama3", other) == (other, [])
    assert one("llama3", f"{text}; {other} é") == (f"; {other} é", [call])
    assert one("llama3", f"<|python_tag|>{other}") == ("", [("Ada", {"age": 36})])
    assert one("llama3", "<|python_tag|>print(1)") == ("<|python_tag|>print(1)", [])
    swapped = '{"type": "function", "name": "get_weather", "parameters": {"town": "B"}}'
    assert one("llama3", swapped) == ("", [call])


KIMI = "<|tool_call_begin|>{}<|tool_call_argument_begin|>{}<|tool_call_end|>"


def test_kimi_ids_and_names() -> None:
    """Names with dashes and dots; ids are the client's to send back, and so are kept."""
    for header, name in (
        ("functions.get-the_weather:0", "get-the_weather"),
        ("functions.mcp.server.tool:12", "mcp.server.tool"),
        ("get_weather:3", "get_weather"),
        (" functions.f:0 ", "f"),
        ("functions.f", "f"),
    ):
        reply = parse("kimi_k2", [KIMI.format(header, '{"a": 1}')])
        assert (reply.names, reply.ids, reply.calls) == ([name], [header.strip()], [(name, {"a": 1})])
    single = Tools({"only": {}})
    assert one("kimi_k2", KIMI.format("0", "{}"), single) == ("", [("only", {})])
    assert one("kimi_k2", KIMI.format("0", "{}")) == (KIMI.format("0", "{}"), [])


def test_kimi_sections() -> None:
    call = KIMI.format("functions.f:0", '{"a": "<|tool_call_end|>"}')
    expected = ("", [("f", {"a": "<|tool_call_end|>"})])
    for text in (
        call,
        f"<|tool_calls_section_begin|>{call}",
        f"<|tool_call_section_begin|>\n{call}\n<|tool_call_section_end|>",
    ):
        assert one("kimi_k2", text) == expected
    assert one("kimi_k2", KIMI.format("functions.f:0", "")) == ("", [("f", {})])
    cut = "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>" + '{"a": 1'
    assert parse("kimi_k2", [cut + call]).arguments == ['{"a": 1', '{"a": "<|tool_call_end|>"}']


def test_glm_types() -> None:
    """A string stays one, whatever it looks like; where no schema says, JSON is JSON."""
    text = "<tool_call>{}<arg_key>{}</arg_key><arg_value>{}</arg_value></tool_call>"

    def value(key: str, shown: str, **schema: Any) -> Any:
        tools = Tools({"f": {"properties": {key: schema} if schema else {}}})
        return parse("glm47", [text.format("f", key, shown)], tools).calls[0][1][key]

    assert value("a", "12", type="string") == "12" and value("a", " x\n", type="string") == " x\n"
    assert value("a", "12", type="integer") == value("a", "12") == 12
    assert (
        value("a", "null", type=["string", "null"]) is None
        and value("a", "7", type=["string", "null"]) == "7"
    )
    assert value("a", "7", anyOf=[{"type": "string"}, {"type": "integer"}]) == 7
    assert value("a", "7", enum=["7", "8"]) == "7"
    assert value("a", "[1, {}]", type="array") == [1, {}] and value("a", "{'k': True}") == {"k": True}
    assert value("a", "not json") == "not json" and value("a", "NaN") == "NaN" and value("a", '"q"') == "q"
    assert value("a", "f(1)") == "f(1)" and value("a", "") == ""


def test_glm_beside_the_rule() -> None:
    assert one("glm45", "<tool_call>f\n</tool_call>") == ("", [("f", {})])
    lacks_end = "<tool_call>get_weather<arg_key>town</arg_key><arg_value>B</arg_value>"
    assert one("glm47", lacks_end) == ("", [("get_weather", {"town": "B"})])
    assert one("glm47", lacks_end + " and é") == (" and é", [("get_weather", {"town": "B"})])
    assert one("glm47", "<tool_call>not a name</tool_call>") == ("<tool_call>not a name</tool_call>", [])
    assert one("glm47", "<tool_call>f<arg_key>k</arg_key></tool_call>") == ("", [("f", {"k": None})])
    cut = parse("glm47", ["<tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value><arg_key>lon"])
    assert cut.arguments == ['{"k": "v", "lon']


def test_pythonic() -> None:
    call = ("get_weather", {"town": "a]b", "days": -1})
    assert one("pythonic", "Now: [get_weather(town='a]b', days=-1)] é") == ("Now: é", [call])
    for text in (
        "[unknown(a=1)]",
        "[get_weather('a')]",
        "[get_weather(town=other)]",
        "[get_weather(town='a'",
        "[get_weather(town='a'), 7]",
        "[get_weather(**{'town': 'a'})]",
        "x[0] = [1, 2]",
    ):
        assert one("pythonic", text) == (text, [])
    wrapped = "<|python_start|>[get_weather(town='a', more={'b': None, 'c': [true]})]<|python_end|>"
    assert one("pythonic", wrapped) == (
        "",
        [("get_weather", {"town": "a", "more": {"b": None, "c": [True]}})],
    )


def test_harmony() -> None:
    call = '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>'
    thought = "<|channel|>analysis<|message|>Hm.<|end|>"
    answer = "<|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
    assert one("gpt-oss", thought + call) == ("Hm.", [("f", {"a": 1})])
    assert one("gpt-oss", call + answer) == ("Yes.", [("f", {"a": 1})])
    assert one("gpt-oss", "plain <|channel|> text") == ("plain <|channel|> text", [])


def test_forced() -> None:
    text = '[{"name": "f", "parameters": {"a": [1]}} , {"parameters": {}, "name": "g"}]'
    assert one("forced", text) == ("", [("f", {"a": [1]}), ("g", {})])
    for other in ("[1, 2]", "[]", "I can't.", '[{"name": 1}]'):
        assert one("forced", other) == (other, [])
    assert one("forced", '[{"name": "f", "parameters": {}}, 7] é') == (", 7] é", [("f", {})])


def test_deepseek_without_fences() -> None:
    text = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}<｜tool▁call▁end｜>"
    assert one("deepseekv3", text.format('{"a": 1}')) == ("", [("f", {"a": 1})])
    assert one("deepseekv31", "<｜tool▁call▁begin｜>f<｜tool▁sep｜><｜tool▁call▁end｜>") == ("", [("f", {})])


def test_qwen3_coder() -> None:
    part = "<parameter={}>\n{}\n</parameter>\n"
    days = part.format("days", "3") + part.format("more", '{"a": [1]}') + part.format("town", "\n 3\n")
    body = f"<function=get_weather>\n{days}</function>"
    call = (
        "get_weather",
        {"days": 3, "more": {"a": [1]}, "town": "\n 3\n"},
    )  # the schema says what is a string
    assert one("qwen3_coder", f"<tool_call>\n{body}\n</tool_call>") == ("", [call])
    assert one("qwen3_coder", f"So: {body}\n</tool_call>\n{body}") == ("So:", [call] * 2)  # marks forgotten
    unknown = body.replace("get_weather", "other")
    assert one("qwen3_coder", unknown) == (unknown, [])
    assert one("qwen3_coder", f"<tool_call>{unknown}")[1][0][0] == "other"
    tight = "<tool_call><function=get_weather><parameter=town>x</parameter></function></tool_call>"
    assert one("qwen3_coder", tight) == ("", [("get_weather", {"town": "x"})])
    for text in ("<tool_call>\nfunction=f", "<tool_call><function=\nf>", "a <function= b"):
        assert one("qwen3_coder", text) == (text, [])


def test_deepseek_v32() -> None:
    town = '<｜DSML｜parameter name="town" string="true"> 3</｜DSML｜parameter>'
    days = '<｜DSML｜parameter name="x" string="false">[1, {"a": null}]</｜DSML｜parameter>'
    text = f'<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n{town}\n{days}\n</｜DSML｜invoke>'
    call = ("f", {"town": " 3", "x": [1, {"a": None}]})  # the tag says what is a string
    assert one("deepseekv32", f"So: {text}\n</｜DSML｜function_calls>") == ("So:", [call])
    as_object = '<｜DSML｜invoke name="f">\n{"a": "</｜DSML｜invoke>"}\n</｜DSML｜invoke>'
    assert one("deepseekv32", as_object) == ("", [("f", {"a": "</｜DSML｜invoke>"})])
    assert one("deepseekv32", '<｜DSML｜invoke name="f"></｜DSML｜invoke>!') == ("!", [("f", {})])
    wrong = "<｜DSML｜invoke f>"
    assert one("deepseekv32", wrong) == (wrong, [])


@pytest.mark.parametrize("name", ["qwen3_coder", "deepseekv32"])
def test_a_tag_that_is_cut_off_is_no_text(name: str) -> None:
    text = WRITERS[name]([("get_weather", {"town": "x"})])
    for end in range(text.index("get_weather") + 15, text.rindex("parameter>")):
        reply = parse(name, [text[:end]])
        assert (reply.text, reply.names) == ("", ["get_weather"]), text[:end]

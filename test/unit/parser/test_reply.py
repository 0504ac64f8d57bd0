"""Reasoning, answer and calls of a reply, in any pieces. Run alone: pytest THIS_FILE"""

from __future__ import annotations

from typing import Any

import pytest
from helpers.tool_texts import CALLS, CUTS, JUNK, TOOLS, WRITERS, Call, Reply, joined, pieces_of
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.function_call.registry import TOOL_FORMATS
from sglang.srt.parser.reasoning import REASONING_FORMATS, Reasoning
from sglang.srt.parser.reply import ReplyEvent, ReplyFormat

THOUGHTS = st.sampled_from(["", "I see.", "a < b\n\nand </thin", "x <tool", "日🙂", "<think> twice"])


def parse(form: ReplyFormat, pieces: list[str]) -> Reply:
    parser = form.parser()
    events = [event for piece in pieces for event in parser.push(piece)]
    return joined([*events, *parser.finish()])


def form(reasoning: str | None, tools: str | None = None, **more: Any) -> ReplyFormat:
    return ReplyFormat(
        reasoning=REASONING_FORMATS[reasoning] if reasoning else None,
        tool_format=TOOL_FORMATS[tools] if tools else None,
        tools=TOOLS,
        **more,
    )


def unnamed(reply: Reply) -> Reply:
    """Without ids that are drawn."""
    reply.ids = [number if number and not number.startswith("call_") else None for number in reply.ids]
    return reply


PAIRS = [("qwen3", "qwen25"), ("glm45", "glm47"), ("kimi_k2", "kimi_k2"), ("deepseek-r1", "deepseekv3")]
TAGGED = [("qwen3", "qwen3_coder"), ("deepseek-v3", "deepseekv32")]


@pytest.mark.parametrize(
    "reasoning,tools", [*PAIRS, *TAGGED, ("deepseek-v3", "deepseekv31"), ("kimi", "llama3")]
)
@settings(max_examples=20, deadline=None)
@given(
    thought=THOUGHTS,
    answer=st.sampled_from(["", "Yes.", "é </think> b"]),
    calls=CALLS,
    cuts=CUTS,
    open_=st.booleans(),
)
def test_parts_come_out_as_written(
    reasoning: str, tools: str, thought: str, answer: str, calls: list[Call], cuts: list[int], open_: bool
) -> None:
    marks = REASONING_FORMATS[reasoning]
    if tools == "llama3":
        answer = ""  # its calls begin the answer
    begin = "\n" if open_ else f"{marks.begin}\n"
    text = f"{begin}{thought}\n{marks.end}\n\n{answer}{WRITERS[tools](calls)}"
    for pieces in ([text], pieces_of(text, cuts), list(text)):
        reply = parse(form(reasoning, tools, reasoning_is_open=open_), pieces)
        said = thought.removeprefix("<think>").lstrip() if open_ and marks.begin == "<think>" else thought
        assert (reply.reasoning, reply.text, reply.calls) == (said, answer, calls)


@pytest.mark.parametrize("reasoning,tools", PAIRS)
@settings(max_examples=30, deadline=None)
@given(
    parts=st.lists(st.sampled_from(JUNK), max_size=12),
    cuts=CUTS,
    flags=st.lists(st.booleans(), min_size=3, max_size=3),
)
def test_the_same_in_any_pieces(
    reasoning: str, tools: str, parts: list[str], cuts: list[int], flags: list[bool]
) -> None:
    text = "".join(parts)
    names = ("reasoning_is_open", "stream_reasoning", "parallel_calls")
    settings_ = form(reasoning, tools, **dict(zip(names, flags, strict=True)))
    whole = unnamed(parse(settings_, [text]))
    assert unnamed(parse(settings_, pieces_of(text, cuts))) == whole == unnamed(parse(settings_, list(text)))
    assert len(whole.names) <= 1 or flags[2]


@pytest.mark.parametrize("reasoning,tools", PAIRS)
def test_a_call_inside_the_reasoning_ends_it(reasoning: str, tools: str) -> None:
    """Models forget to close it; the call must not be lost in it."""
    text = f"I look it up. {WRITERS[tools]([('ns.run', {})])}"
    reply = parse(form(reasoning, tools, reasoning_is_open=True), [text])
    assert (reply.reasoning, reply.text, reply.calls) == ("I look it up.", "", [("ns.run", {})])
    without_tools = parse(form(reasoning, reasoning_is_open=True), [text])
    assert (without_tools.reasoning, without_tools.text) == (text, "")


def test_channels() -> None:
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    preamble = "<|channel|>commentary<|message|>I look. <|end|><|start|>assistant"
    text = f"{thought}{preamble}{WRITERS['gpt-oss']([('ns.run', {})])}"
    for pieces in ([text], list(text)):
        reply = parse(form("gpt-oss", "gpt-oss"), pieces)
        assert (reply.reasoning, reply.text, reply.calls) == ("Hm.", "I look.", [("ns.run", {})])
    answer = f"{thought}<|channel|>final<|message|>Yes <|x|>."
    assert parse(form("gpt-oss"), list(answer)) == Reply("Hm.", "Yes <|x|>.")


def test_only_the_beginning_of_a_reply_is_reasoning() -> None:
    text = "The mark <think> begins a thought, </think> ends it."
    assert parse(form("qwen3"), list(text)) == Reply(text=text)
    assert parse(form(None), list(text)) == Reply(text=text)


@pytest.mark.parametrize(
    "name,prompt,is_open",
    [
        ("qwen3", "<|im_start|>assistant\n", False),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("qwen3", "<|im_start|>user\nwhat is <think><|im_end|>\n<|im_start|>assistant\n", False),
        ("qwen3-thinking", "<|im_start|>assistant\n<think>\n", True),
        ("glm45", "<|assistant|><think>", True),
        ("glm45", "<|assistant|></think>", False),
        ("kimi_k2", "<|im_middle|><think></think>", False),
        ("kimi", "◁think▷", True),
        ("deepseek-r1", "<｜Assistant｜>", True),
        ("deepseek-r1", "<｜Assistant｜><think>\n", True),
        ("deepseek-v3", "<｜Assistant｜></think>", False),
    ],
)
def test_the_prompt_says_whether_a_reply_begins_inside(name: str, prompt: str, is_open: bool) -> None:
    assert REASONING_FORMATS[name].is_open(prompt) is is_open


def test_reasoning_that_does_not_end() -> None:
    reply = parse(form("qwen3", "qwen25"), list("<think>So it goes on \n"))
    assert (reply.reasoning, reply.text) == ("So it goes on", "")


def events(form_: ReplyFormat, text: str) -> list[list[ReplyEvent]]:
    parser = form_.parser()
    return [*(parser.push(letter) for letter in text), parser.finish()]


def test_reasoning_in_one_piece() -> None:
    text = "<think>So it goes.</think>Yes."
    streamed = [e for es in events(form("qwen3"), text) for e in es if isinstance(e, Reasoning)]
    assert len(streamed) > 5
    for end in (len(text), text.index("</think>")):
        whole = [e for es in events(form("qwen3", stream_reasoning=False), text[:end]) for e in es]
        assert [e for e in whole if isinstance(e, Reasoning)] == [Reasoning("So it goes.")] == whole[:1]


def test_only_the_first_call_where_one_is_wanted() -> None:
    calls: list[Call] = [("ns.run", {}), ("get_weather", {"days": 2})]
    text = f"{WRITERS['qwen25'](calls)} é"
    reply = parse(form(None, "qwen25", parallel_calls=False), [text])
    assert (reply.calls, reply.text) == (calls[:1], " é")
    everything = parse(form(None, "qwen25"), [text])
    assert everything.calls == calls and len(set(everything.ids)) == 2

"""Tool calls as models write them, and replies put together again from a parser's events."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from sglang.srt.function_call.events import CallArguments, CallStart, Text
from sglang.srt.function_call.tools import Tools
from sglang.srt.parser.reasoning import Reasoning
from sglang.srt.parser.reply import ReplyEvent

Call = tuple[str, dict[str, Any]]

TOOLS = Tools(
    {
        "get_weather": {
            "type": "object",
            "properties": {
                "town": {"type": "string"},
                "days": {"type": "integer"},
                "more": {"type": "object"},
            },
        },
        "list-files": {"type": "object", "properties": {"path": {"type": "string"}}},
        "ns.run": {},
    }
)

CUTS = st.lists(st.integers(0, 400), max_size=30)


@dataclass
class Reply:
    """What a client has in the end."""

    reasoning: str = ""
    text: str = ""
    names: list[str] = field(default_factory=list)
    ids: list[str | None] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)

    @property
    def calls(self) -> list[Call]:
        return [(name, json.loads(text)) for name, text in zip(self.names, self.arguments, strict=True)]


def joined(events: Iterable[ReplyEvent]) -> Reply:
    reply = Reply()
    for event in events:
        if isinstance(event, Reasoning):
            reply.reasoning += event.text
        elif isinstance(event, Text):
            reply.text += event.text
        elif isinstance(event, CallStart):
            reply.names.append(event.name)
            reply.ids.append(event.id)
            reply.arguments.append("")
        else:
            assert isinstance(event, CallArguments)
            reply.arguments[-1] += event.text
    return reply


def pieces_of(text: str, cuts: Sequence[int]) -> list[str]:
    ends = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    return [text[begin:end] for begin, end in zip(ends, ends[1:], strict=False)]


def _glm(call: Call, line: str) -> str:
    parts = [f"<tool_call>{call[0]}"]
    for key, value in call[1].items():
        shown = value if isinstance(value, str) else json.dumps(value)
        parts += [f"<arg_key>{key}</arg_key>", f"<arg_value>{shown}</arg_value>"]
    return line.join([*parts, "</tool_call>"])


def _hermes(calls: list[Call]) -> str:
    bodies = [json.dumps({"name": name, "arguments": args}, ensure_ascii=False) for name, args in calls]
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


def _llama3(calls: list[Call]) -> str:
    return "; ".join(json.dumps({"name": name, "parameters": args}) for name, args in calls)


def _kimi(calls: list[Call]) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{json.dumps(args)}<|tool_call_end|>"
        for i, (name, args) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def _deepseek(one: Callable[[str, str], str]) -> Callable[[list[Call]], str]:
    def write(calls: list[Call]) -> str:
        inner = "\n".join(
            f"<｜tool▁call▁begin｜>{one(name, json.dumps(args, ensure_ascii=False))}<｜tool▁call▁end｜>"
            for name, args in calls
        )
        return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"

    return write


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _qwen3_coder(calls: list[Call]) -> str:
    written = []
    for name, args in calls:
        parts = "".join(f"<parameter={key}>\n{_shown(value)}\n</parameter>\n" for key, value in args.items())
        written.append(f"<tool_call>\n<function={name}>\n{parts}</function>\n</tool_call>")
    return "\n".join(written)


def _dsml(calls: list[Call]) -> str:
    written = []
    for name, args in calls:
        parts = "".join(
            f'<｜DSML｜parameter name="{key}" string="{str(isinstance(value, str)).lower()}">{_shown(value)}'
            "</｜DSML｜parameter>\n"
            for key, value in args.items()
        )
        written.append(f'<｜DSML｜invoke name="{name}">\n{parts}</｜DSML｜invoke>\n')
    return f"<｜DSML｜function_calls>\n{''.join(written)}</｜DSML｜function_calls>"


def _harmony(calls: list[Call]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(args)}<|call|>"
        for name, args in calls
    )


def _pythonic(calls: list[Call]) -> str:
    shown = (f"{name}({', '.join(f'{k}={v!r}' for k, v in args.items())})" for name, args in calls)
    return f"[{', '.join(shown)}]"


WRITERS: dict[str, Callable[[list[Call]], str]] = {
    "deepseekv3": _deepseek(lambda name, args: f"function<｜tool▁sep｜>{name}\n```json\n{args}\n```"),
    "deepseekv31": _deepseek(lambda name, args: f"{name}<｜tool▁sep｜>{args}"),
    "deepseekv32": _dsml,
    "glm45": lambda calls: "\n".join(_glm(call, "\n") for call in calls),
    "glm47": lambda calls: "".join(_glm(call, "") for call in calls),
    "gpt-oss": _harmony,
    "kimi_k2": _kimi,
    "llama3": _llama3,
    "pythonic": _pythonic,
    "qwen25": _hermes,
    "qwen3_coder": _qwen3_coder,
}

WRITERS["forced"] = lambda calls: json.dumps([{"name": name, "parameters": args} for name, args in calls])

# What is written between the parts: marks of every format, and texts that break them.
JUNK = [
    "<tool_call>", "</tool_call>", "<tool", "\n", " ", "}", "{", '"', "\\", "[", "]", "(", "x",
    '{"name": "get_weather", ', '{"name": "get_weather", "arguments": {', '"arguments": {"town": "B"}',
    '"a": 1', '{"arguments": {}, "name": "f"}', "get_weather", "<arg_key>", "</arg_key>", "<arg_value>",
    "</arg_value>", "town", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
    "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>",
    "functions.get_weather:0", "7", "<|python_tag|>", ";", "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "function",
    "```json\n", "\n```", "[get_weather(", "town='x'", "f(a=1)", ")", "é🙂", "<think>", "</think>",
    "<function=", "get_weather>", "<parameter=", "town>\n", "\n</parameter>", "</function>",
    "<｜DSML｜invoke",
    ' name="get_weather">', "<｜DSML｜parameter", ' name="town" string="true">', "</｜DSML｜parameter>",
    ' name="days" string="false">', "</｜DSML｜invoke>", "<｜DSML｜function_calls>", "<function=get_weather>",
    "<|python_start|>", '{"name": "get_weather", "parameters": {"days": 1}}',
]  # fmt: skip

_WORDS = st.text(st.sampled_from("ab é\n\t\"\\'{}[]<>/,:0日🙂"), max_size=8)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | _WORDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_WORDS, inner, max_size=2),
    max_leaves=4,
)
CALLS = st.lists(
    st.one_of(
        st.tuples(
            st.just("get_weather"),
            st.fixed_dictionaries(
                {},
                optional={
                    "town": _WORDS,
                    "days": st.integers(-9, 9),
                    "more": st.dictionaries(_WORDS, _VALUES, max_size=2),
                },
            ),
        ),
        st.tuples(st.just("list-files"), st.fixed_dictionaries({"path": _WORDS})),
        st.tuples(
            st.just("ns.run"), st.fixed_dictionaries({}, optional={"a_b": st.lists(_VALUES, max_size=2)})
        ),
    ),
    min_size=1,
    max_size=3,
)

"""Unit tests of the ways to talk to servers, and of what is read out of their streams."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmark.spec_toggle.client import GenerationError
from benchmark.spec_toggle.prompts import Prompt
from benchmark.spec_toggle.protocols import CHAT, COMPLETIONS, NATIVE, OPENAI, Wish, parse_openai
from benchmark.spec_toggle.streams import events_of

PROMPT = Prompt("p", "d", "<s>hello", ({"role": "user", "content": "hello"},))


def _chunk(text: str = "", finish: str | None = None, tokens: int | None = None) -> bytes:
    choice = {"delta": {"content": text}, "finish_reason": finish}
    chunk: dict[str, Any] = {"choices": [choice]}
    if tokens is not None:
        chunk["usage"] = {"completion_tokens": tokens}
    return json.dumps(chunk).encode()


def _usage(tokens: int) -> bytes:
    return json.dumps({"choices": [], "usage": {"completion_tokens": tokens}}).encode()


def test_each_way_asks_for_the_same() -> None:
    wish = Wish(7, seed=3)
    assert NATIVE.body(PROMPT, wish, "m") == {
        "text": "<s>hello",
        "sampling_params": {
            "temperature": 0.0,
            "max_new_tokens": 7,
            "ignore_eos": True,
            "sampling_seed": 3,
        },
    }
    for protocol in (CHAT, COMPLETIONS):
        body = protocol.body(PROMPT, wish, "m")
        assert (body["max_tokens"], body["ignore_eos"], body["seed"], body["model"]) == (7, True, 3, "m")
        assert body["stream_options"]["continuous_usage_stats"]
    assert COMPLETIONS.body(PROMPT, wish, "m")["prompt"] == "<s>hello"
    assert CHAT.body(PROMPT, wish, "m")["messages"] == [{"role": "user", "content": "hello"}]
    strict = OPENAI.body(PROMPT, Wish(7), "m")
    assert set(strict) == {"model", "messages", "max_completion_tokens", "temperature", "stream_options"}
    assert strict["stream_options"] == {"include_usage": True}
    with pytest.raises(ValueError, match="at least 1 token"):
        Wish(0)


def test_counts_told_with_every_chunk_are_believed() -> None:
    received = [
        (1.0, _chunk("", tokens=0)),
        (2.0, _chunk("a", tokens=1)),
        (3.0, _chunk("bcd", tokens=4)),
        (4.0, _chunk("", "length", tokens=5)),
        (4.1, _usage(5)),
    ]
    trace = parse_openai(0.5, received)
    assert (trace.times, trace.counts, trace.text) == ((2.0, 3.0, 4.0), (1, 4, 5), "abcd")
    assert trace.meta["completion_tokens"] == 5


@given(chunks=st.integers(1, 40), extra=st.integers(0, 100))
def test_counts_that_are_not_told_are_spread_over_the_chunks(chunks: int, extra: int) -> None:
    total = chunks + extra
    received = [(float(i), _chunk("x", "stop" if i == chunks - 1 else None)) for i in range(chunks)]
    trace = parse_openai(-1.0, [*received, (99.0, _usage(total))])
    assert len(trace.times) == chunks
    assert trace.counts[-1] == total
    steps = [b - a for a, b in zip((0, *trace.counts), trace.counts, strict=False)]
    assert max(steps) - min(steps) <= 1


def test_text_completions_and_thoughts_count_too() -> None:
    lines = [
        {"choices": [{"text": "ab", "finish_reason": None}]},
        {"choices": [{"delta": {"reasoning_content": "hm"}, "finish_reason": None}]},
        {"choices": [{"delta": {"tool_calls": [{"index": 0}]}, "finish_reason": "tool_calls"}]},
    ]
    trace = parse_openai(0.0, [(float(i), json.dumps(line).encode()) for i, line in enumerate(lines)])
    assert trace.counts == (1, 2, 3)


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([b'{"error": {"message": "too long"}}'], "too long"),
        ([_chunk("a")], "before the request was finished"),
        ([_chunk("a", "abort")], "aborted"),
    ],
)
def test_streams_that_went_wrong_are_refused(events: list[bytes], message: str) -> None:
    with pytest.raises(GenerationError, match=message):
        parse_openai(0.0, [(1.0, event) for event in events])


@given(
    payloads=st.lists(st.text(st.characters(blacklist_categories=("Cs",)), max_size=8), max_size=8),
    end=st.sampled_from(["\n\n", "\r\n\r\n"]),
    data=st.data(),
)
def test_events_do_not_depend_on_where_the_pieces_break(
    payloads: list[str], end: str, data: st.DataObject
) -> None:
    events = [json.dumps({"text": payload}) for payload in payloads]
    whole = "".join(f": note\nevent: e\ndata: {event}{end}" for event in [*events, "[DONE]"]).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    edges = [0, *cuts, len(whole)]
    pieces = [(float(i), whole[a:b]) for i, (a, b) in enumerate(zip(edges, edges[1:], strict=False))]
    assert [event.decode() for _, event in events_of(pieces)] == [
        line.replace("\r\n", "\n") for line in events
    ]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))

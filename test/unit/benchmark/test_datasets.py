"""The shipped prompts. Run alone: pytest test/unit/benchmark/test_datasets.py"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.benchmark.datasets import DATASETS, DatasetError, DatasetOptions, load

SHIPPED = ("humaneval", "bfcl", "chat")


class WordTokenizer:
    """A word is a token; a number is its text."""

    vocab_size = 50

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [int(w) if w.isdigit() else 0 for w in text.split()]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, ids))

    def special_ids(self) -> frozenset[int]:
        return frozenset({0, 1})

    def apply_chat_template(self, messages: Sequence[dict[str, Any]], tools: Any) -> str:
        return "".join(f"<{m['role']}> {m['content']}\n" for m in messages) + "<assistant>"


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_set_gives_as_many_rows_as_asked_for(name: str) -> None:
    for count in (1, 7, 500):
        rows = load(name, DatasetOptions(num_prompts=count, output_len=9))
        assert len(rows) == count
        assert all(row.messages and row.messages[-1]["role"] == "user" for row in rows)
        assert {row.output_len for row in rows} == {9}
    assert [r.messages for r in rows] != [r.messages for r in load(name, DatasetOptions(500, seed=1))]


@pytest.mark.parametrize("name", SHIPPED)
def test_a_tokenizer_makes_texts_of_known_length(name: str) -> None:
    words = WordTokenizer()
    for row in load(name, DatasetOptions(num_prompts=20, tokenizer=words)):
        assert isinstance(row.prompt, str) and row.messages is not None
        assert row.messages[-1]["content"] in row.prompt
        assert row.prompt_len == len(words.encode(row.prompt)) > 0


def test_held_out_problems_are_a_part_of_all() -> None:
    def codes(held_out: bool) -> set[str]:
        rows = load("humaneval", DatasetOptions(num_prompts=164, held_out=held_out))
        return {row.chat_messages()[0]["content"] for row in rows}

    assert len(codes(False)) == 164 and len(codes(True)) == 64 and codes(True) < codes(False)


def test_conversations_go_on_side_by_side_and_keep_their_past() -> None:
    rows = load("bfcl", DatasetOptions(num_prompts=30))
    turns = [sum(m["role"] == "user" for m in row.chat_messages()) for row in rows]
    assert turns == sorted(turns) and turns[-1] > 1
    for row in rows[turns.index(2) :]:
        past = row.chat_messages()[:-2]
        assert any(other.messages == past for other in rows)
        calls = json.loads(row.chat_messages()[-2]["content"])
        assert all(call.keys() == {"name", "arguments"} for call in calls)


def test_services_are_a_common_prefix() -> None:
    rows = load("bfcl", DatasetOptions(num_prompts=100))
    systems = [row.chat_messages()[0]["content"] for row in rows]
    assert len(set(systems)) < 25 and min(map(len, systems)) > 5000
    few = load("bfcl", DatasetOptions(num_prompts=100, max_tools=4))
    assert max(len(row.chat_messages()[0]["content"]) for row in few) < min(map(len, systems))


def test_native_tools_are_sent_beside_the_messages() -> None:
    for row in load("bfcl", DatasetOptions(num_prompts=60, native_tools=True)):
        assert row.tools and row.chat_messages()[0]["role"] == "user"
        assert all(tool["function"]["parameters"]["type"] == "object" for tool in row.tools)
        asked = [c["id"] for m in row.chat_messages() for c in m.get("tool_calls", ())]
        assert asked == [m["tool_call_id"] for m in row.chat_messages() if m["role"] == "tool"]


@settings(deadline=None, max_examples=20)
@given(limit=st.integers(900, 3000))
def test_no_row_is_longer_than_the_context(limit: int) -> None:
    words = WordTokenizer()
    rows = load("bfcl", DatasetOptions(50, tokenizer=words, output_len=10, context_len=limit, max_tools=8))
    assert all(row.prompt_len + row.output_len <= limit for row in rows)


def test_what_can_not_be_made_is_refused() -> None:
    with pytest.raises(DatasetError, match="choose one of"):
        load("nothing", DatasetOptions())
    with pytest.raises(DatasetError, match="no prompt of at most 3 tokens"):
        load("chat", DatasetOptions(tokenizer=WordTokenizer(), context_len=3))
    with pytest.raises(DatasetError, match="at least one"):
        load("chat", DatasetOptions(num_prompts=0))
    assert set(SHIPPED) <= set(DATASETS)

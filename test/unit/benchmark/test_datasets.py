"""The shipped prompts. Run alone: pytest test/unit/benchmark/test_datasets.py"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_tokenizer import write_byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.benchmark.datasets import DATASETS, DatasetError, DatasetOptions, load
from sglang.benchmark.tokenizer import load_tokenizer

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


@settings(deadline=None, max_examples=10)
@given(limit=st.integers(900, 3000))
def test_no_row_is_longer_than_the_context(limit: int) -> None:
    words = WordTokenizer()
    rows = load("bfcl", DatasetOptions(20, tokenizer=words, output_len=10, context_len=limit, max_tools=8))
    assert all(row.prompt_len + row.output_len <= limit for row in rows)


def test_what_can_not_be_made_is_refused() -> None:
    with pytest.raises(DatasetError, match="choose one of"):
        load("nothing", DatasetOptions())
    with pytest.raises(DatasetError, match="no prompt of at most 3 tokens"):
        load("chat", DatasetOptions(tokenizer=WordTokenizer(), context_len=3))
    with pytest.raises(DatasetError, match="at least one"):
        load("chat", DatasetOptions(num_prompts=0))
    assert set(SHIPPED) <= set(DATASETS)


@settings(deadline=None, max_examples=10)
@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from([0.0, 0.5, 1.0]), st.booleans())
def test_random_prompts_have_their_length(longest: int, output: int, ratio: float, as_ids: bool) -> None:
    words = WordTokenizer()
    options = DatasetOptions(
        6, tokenizer=words, random_input_len=longest, random_output_len=output, random_range_ratio=ratio,
        tokenize_prompt=as_ids,
    )  # fmt: skip
    for row in load("random-ids", options):
        ids = row.prompt if as_ids else words.encode(str(row.prompt))
        assert len(ids) == row.prompt_len and not words.special_ids() & set(map(int, ids))  # type: ignore[arg-type]
        assert max(1, int(longest * ratio)) <= row.prompt_len <= longest
        assert max(1, int(output * ratio)) <= row.output_len <= output


def test_real_words_are_repeated_or_cut_to_length() -> None:
    options = DatasetOptions(30, tokenizer=WordTokenizer(), random_input_len=200, random_range_ratio=1.0)
    assert {row.prompt_len for row in load("random", options)} == {200}


def test_groups_share_their_beginning() -> None:
    options = DatasetOptions(
        tokenizer=WordTokenizer(), gsp_num_groups=3, gsp_prompts_per_group=4, gsp_system_prompt_len=20,
        gsp_question_len=5, gsp_output_len=6,
    )  # fmt: skip
    rows = load("generated-shared-prefix", options)
    assert len(rows) == 12 and {(row.prompt_len, row.output_len) for row in rows} == {(25, 6)}
    systems = [str(row.prompt).partition("\n\n")[0] for row in rows]
    assert sorted(map(systems.count, set(systems))) == [4, 4, 4]
    assert len({row.prompt for row in rows}) == 12  # type: ignore[type-var]


def test_recorded_conversations(tmp_path: Path) -> None:
    said = [(f"question {i} more", "an answer of five words") for i in range(6)] + [("x", "y")]
    sharegpt, custom = tmp_path / "sharegpt.json", tmp_path / "custom.jsonl"
    sharegpt.write_text(json.dumps([{"conversations": [{"value": q}, {"value": a}]} for q, a in said]))
    custom.write_text(
        "\n".join(json.dumps({"conversations": [{"content": t} for t in both]}) for both in said)
    )
    words = WordTokenizer()
    for name, path in (("sharegpt", sharegpt), ("custom", custom)):
        rows = load(name, DatasetOptions(6, tokenizer=words, dataset_path=path))
        assert {row.prompt for row in rows} == {q for q, _ in said[:-1]}  # type: ignore[comparison-overlap]
        assert {(row.prompt_len, row.output_len) for row in rows} == {(3, 5)}
        chats = load(name, DatasetOptions(6, tokenizer=words, dataset_path=path, apply_chat_template=True))
        assert all(str(row.prompt).startswith("<user> question") for row in chats)
        (row,) = load(name, DatasetOptions(1, dataset_path=path, output_len=9))
        assert (row.prompt_len, row.output_len) == (0, 9)
    options = DatasetOptions(
        9, tokenizer=words, dataset_path=sharegpt, random_input_len=7, random_range_ratio=1
    )
    assert {row.prompt_len for row in load("random", options)} == {7}


def test_openai_requests_keep_their_own_fields(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    messages = [{"role": "user", "content": "hello there"}]
    lines = [
        {"messages": messages, "max_tokens": 5, "temperature": 0.3, "model": "m"},
        {"messages": messages},
    ]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    first, second = load("openai", DatasetOptions(2, dataset_path=file))
    assert (first.output_len, first.extra, second.output_len) == (5, {"temperature": 0.3}, 256)
    assert first.chat_messages() == messages


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("sharegpt", "{", "is not JSON"),
        ("sharegpt", "{}", "is not a JSON list"),
        ("sharegpt", "[]", "no conversation of two turns"),
        ("custom", "[1]", "line 1 of .* is not a JSON object"),
        ("custom", "{}", "has no prompt"),
        ("openai", "\n\n{}", "line 1 of .* has no list of messages"),
        ("openai", "nonsense", "line 1 of .* is not JSON"),
    ],
)
def test_files_of_another_format_are_refused(name: str, text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_text(text)
    with pytest.raises(DatasetError, match=said):
        load(name, DatasetOptions(tokenizer=WordTokenizer(), dataset_path=file))
    for path, what in ((None, "--dataset-path"), (tmp_path / "missing", "can't be read")):
        with pytest.raises(DatasetError, match=what):
            load(name, DatasetOptions(tokenizer=WordTokenizer(), dataset_path=path))


def test_tokenizers_are_read_from_folders_and_nothing_is_downloaded(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_byte_tokenizer(tmp_path))
    assert tokenizer.encode("ab") == [97, 98] and tokenizer.decode([97]) == "a"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], None) == "<user>x\n<assistant>"
    with pytest.raises(DatasetError, match="no tokenizer for some/model .*--tokenizer"):
        load_tokenizer("some/model")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DatasetError, match="no tokenizer for"):
        load_tokenizer(tmp_path)
    bare = load_tokenizer(write_byte_tokenizer(tmp_path / "bare", chat_template=None))
    with pytest.raises(DatasetError, match="no chat template"):
        load("chat", DatasetOptions(1, tokenizer=bare))

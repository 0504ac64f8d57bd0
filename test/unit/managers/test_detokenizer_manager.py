"""Token batches become text batches, request by request. Run alone: pytest THIS_FILE"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_tokenizer import write_merged_tokenizer

from sglang.srt.managers.detokenizer_manager import DetokenizerManager
from sglang.srt.managers.io_struct import FinishReason, RequestStats, TokenBatch, TokenOutput
from sglang.srt.utils.text_tokenizer import TextTokenizer

STATS = RequestStats(prompt_tokens=1, completion_tokens=1, cached_tokens=0)
END = FinishReason("length", length=9)


@pytest.fixture
def tokenizer(tmp_path: Path) -> TextTokenizer:
    return TextTokenizer.from_folder(write_merged_tokenizer(tmp_path))


def output(rid: str, ids: list[int], **fields: Any) -> TokenOutput:
    return TokenOutput(rid, ids, STATS, **fields)


def test_requests_do_not_mix(tokenizer: TextTokenizer) -> None:
    manager = DetokenizerManager(tokenizer)
    first, second = "é".encode()
    batch = manager.handle(TokenBatch([output("a", [first]), output("b", list(b"x"))]))
    assert [(o.rid, o.new_text) for o in batch.outputs] == [("a", ""), ("b", "x")]
    batch = manager.handle(TokenBatch([output("a", [second], finish=END)]))
    assert [(o.new_text, o.new_ids, o.finish) for o in batch.outputs] == [("é", [second], END)]
    assert manager.num_running == 1
    manager.handle(TokenBatch([output("b", [], finish=FinishReason("abort", message="gone"))]))
    assert manager.num_running == 0


def test_a_name_can_be_used_again(tokenizer: TextTokenizer) -> None:
    manager = DetokenizerManager(tokenizer)
    manager.handle(TokenBatch([output("a", [0xC3], finish=END)]))
    batch = manager.handle(TokenBatch([output("a", [0xA9], finish=END)]))
    assert batch.outputs[0].new_text == "\ufffd"  # not the end of what the first one began


def test_special_tokens(tokenizer: TextTokenizer) -> None:
    ids = [*b"a", *tokenizer.encode("<|end|>"), *tokenizer.encode("<think now>")]
    manager = DetokenizerManager(tokenizer)
    shown = manager.handle(TokenBatch([output("a", ids, finish=END, skip_special_tokens=False)]))
    hidden = manager.handle(TokenBatch([output("a", ids, finish=END)]))
    assert shown.outputs[0].new_text == "a<|end|><think now>"
    assert hidden.outputs[0].new_text == "a<think now>"


@pytest.mark.parametrize("kept", [False, True])
def test_the_id_that_ended_it_is_cut(tokenizer: TextTokenizer, kept: bool) -> None:
    """Special or not, and shown or not; as a stop string is, and with the same way to keep it."""
    manager = DetokenizerManager(tokenizer)
    end = tokenizer.encode("<|end|>")
    for ids, shown in (([*b"ab", *end], "ab<|end|>"), (list(b"abc"), "abc")):
        finish = FinishReason("stop", matched=ids[-1])
        given = output("a", ids, finish=finish, skip_special_tokens=False, no_stop_trim=kept)
        (text,) = manager.handle(TokenBatch([given])).outputs
        assert (text.new_text, text.new_ids) == (shown if kept else "ab", ids)
    longest = output("a", list(b"abc"), finish=FinishReason("length", length=3))
    assert manager.handle(TokenBatch([longest])).outputs[0].new_text == "abc"


def test_stop_strings_are_held_back_and_cut(tokenizer: TextTokenizer) -> None:
    manager = DetokenizerManager(tokenizer)
    texts = []
    for piece in ("one E", "N", "T E", "ND"):
        is_last = piece == "ND"
        fields: dict[str, Any] = {"finish": END, "stop_trim": "END"} if is_last else {}
        batch = manager.handle(TokenBatch([output("a", list(piece.encode()), stop=("END",), **fields)]))
        texts.append(batch.outputs[0].new_text)
    assert texts == ["one ", "", "ENT ", ""]

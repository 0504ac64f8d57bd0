"""Nothing is put between tokens, special ones or others. Run alone: pytest THIS_FILE

``spaces_between_special_tokens`` concerns decoders that put blanks there. Those of a tokenizer.json never do,
whatever it says (-m long: beside transformers), and so does no decoder here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.tiny_tiktoken import write_tiny_kimi
from helpers.tiny_tokenizer import write_fallback_tokenizer, write_merged_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from sglang.srt.managers.detokenizer_manager import DetokenizerManager
from sglang.srt.managers.io_struct import FinishReason, RequestStats, TokenBatch, TokenOutput
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.text_tokenizer import TextTokenizer


def with_special_tokens(write: Callable[[Path], Path]) -> Callable[[Path], Path]:
    def written(folder: Path) -> Path:
        write(folder)
        file = str(folder / "tokenizer.json")
        tokenizer = Tokenizer.from_file(file)
        tokenizer.add_special_tokens(["<one>", "<two>"])
        tokenizer.save(file)
        return folder

    return written


FILES = {
    "bpe": with_special_tokens(write_merged_tokenizer),
    "sentencepiece": with_special_tokens(write_fallback_tokenizer),
}
WRITERS = FILES | {"tiktoken": write_tiny_kimi}
STATS = RequestStats(prompt_tokens=1, completion_tokens=1, cached_tokens=0)
PICKS = st.lists(st.tuples(st.booleans(), st.integers(0, 10**6)), min_size=1, max_size=12)


@pytest.fixture(scope="module", params=WRITERS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return TextTokenizer.from_folder(WRITERS[request.param](tmp_path_factory.mktemp(request.param)))


def picked(tokenizer: TextTokenizer, picks: list[tuple[bool, int]]) -> list[int]:
    """Special and ordinary ids, mixed."""
    special, plain = sorted(tokenizer.special_ids), tokenizer.encode("hello world", add_special_tokens=False)
    return [
        (special if is_special else plain)[n % len(special if is_special else plain)]
        for is_special, n in picks
    ]


def shown(tokenizer: TextTokenizer, ids: list[int]) -> str:
    output = TokenOutput("a", ids, STATS, finish=FinishReason("length", length=1), skip_special_tokens=False)
    return DetokenizerManager(tokenizer).handle(TokenBatch([output])).outputs[0].new_text


@settings(max_examples=30)
@given(PICKS)
def test_special_tokens_stand_beside_each_other(
    tokenizer: TextTokenizer, picks: list[tuple[bool, int]]
) -> None:
    assert tokenizer.special_ids
    ids = picked(tokenizer, picks)
    text = shown(tokenizer, ids)
    if tokenizer.is_byte_level:
        assert text.encode() == b"".join(map(tokenizer.token_bytes, ids))
    for first, second in zip(ids, ids[1:], strict=False):
        if {first, second} <= tokenizer.special_ids:
            assert shown(tokenizer, [first]) + shown(tokenizer, [second]) in text


def test_both_values_are_taken() -> None:
    for value in (True, False):
        assert SamplingParams.from_dict({"spaces_between_special_tokens": value})


@pytest.mark.long
@pytest.mark.parametrize("kind", FILES)
def test_transformers_puts_nothing_there_either(kind: str, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = TextTokenizer.from_folder(FILES[kind](tmp_path))
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))

    @settings(deadline=None)
    @given(PICKS)
    def agrees(picks: list[tuple[bool, int]]) -> None:
        ids = picked(tokenizer, picks)
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        texts = {
            theirs.decode(ids, spaces_between_special_tokens=value, **options) for value in (True, False)
        }
        assert len(texts) == 1
        assert kind == "sentencepiece" or texts == {shown(tokenizer, ids)}

    agrees()

"""The bytes of every token: what a grammar library knows of a tokenizer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang.srt.constrained.grammar import GrammarError, Masks
from sglang.srt.utils.text_tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class Vocabulary:
    tokens: tuple[bytes, ...]  # as long as the model's rows of logits; b"" for ids that stand for nothing
    special_ids: frozenset[int]  # which are no part of a text, though they have bytes
    stop_ids: tuple[int, ...]  # that end a text

    @property
    def num_words(self) -> int:
        """Of one mask."""
        return -(-len(self.tokens) // 32)

    def spelled(self, with_special: bool) -> list[bytes]:
        """What each id adds to a text that a grammar matches; special ones add nothing unless asked for."""
        hidden = frozenset(self.stop_ids) if with_special else self.special_ids.union(self.stop_ids)
        return [b"" if token in hidden else text for token, text in enumerate(self.tokens)]

    def mask_without(self, ids: tuple[int, ...]) -> Masks:
        """[words]: everything but ``ids``."""
        mask = np.full(self.num_words, -1, np.int32)
        for token in ids:
            if 0 <= token < len(self.tokens):
                mask.view(np.uint32)[token // 32] &= np.uint32(0xFFFFFFFF ^ (1 << token % 32))
        return mask


def blank_vocabulary(size: int) -> Vocabulary:
    """Where only the number of tokens matters."""
    return Vocabulary((b"",) * size, frozenset(), ())


def read_vocabulary(tokenizer: TextTokenizer, vocab_size: int, stop_ids: tuple[int, ...]) -> Vocabulary:
    """
    Raises:
        GrammarError: the tokenizer does not say which bytes a token stands for, or nothing ends a text.
    """
    if not (tokenizer.is_byte_level or tokenizer.has_byte_fallback):
        raise GrammarError(
            "structured output needs a tokenizer whose tokens are bytes (byte-level BPE, or one with byte"
            " fallback), and this model's is neither"
        )
    ends = tuple(token for token in stop_ids if 0 <= token < vocab_size)
    if not ends:
        raise GrammarError("structured output needs an end-of-text token, and this model has none")
    num_known = min(tokenizer.vocab_size, vocab_size)
    known = [tokenizer.token_bytes(token) for token in range(num_known)]
    tokens = (*known, *[b""] * (vocab_size - num_known))
    return Vocabulary(tokens, tokenizer.special_ids, ends)

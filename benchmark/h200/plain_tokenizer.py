"""A tokenizer for a model folder that has none: byte-level, as large as the model's vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

_SPACE = "\u0120"  # how byte-level tokenizers write a blank


def write_tokenizer(folder: Path, vocab_size: int) -> Path:
    """The bytes, then made-up words: detokenising costs what it does with a real model."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = alphabet + [_SPACE + _word(index) for index in range(vocab_size - len(alphabet))]
    vocab = {name: token for token, name in enumerate(names[:vocab_size])}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    (folder / "tokenizer_config.json").write_text(json.dumps({}))
    return folder


def _word(index: int) -> str:
    """aa, ab, …, ba, …: another one for every index."""
    letters = ""
    while index or len(letters) < 2:
        index, letter = divmod(index, 26)
        letters = chr(ord("a") + letter) + letters
    return letters

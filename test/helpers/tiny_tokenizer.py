"""Tokenizers for tiny models: one id for each byte, and one of the other kind (with byte fallback)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]


def byte_characters() -> list[str]:
    """GPT-2's stand-in for each byte, in the order of the bytes."""
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in set(_PRINTABLE) else chr(next(others)) for byte in range(256)]


def write_byte_tokenizer(folder: str | Path, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """Ids are bytes, as in ``tiny_models``; no token is special, but id 2 ends a text."""
    vocab = {character: byte for byte, character in enumerate(byte_characters())}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _write(Path(folder), tokenizer, {"chat_template": chat_template} if chat_template else {})


def write_merged_tokenizer(folder: str | Path) -> Path:
    """Byte-level with special tokens, and tokens that begin or end inside a character."""
    characters = byte_characters()
    vocab = {character: byte for byte, character in enumerate(characters)}
    merges = []
    for text in ("é", "日本", "🙂", " the", "ing"):
        parts = [characters[byte] for byte in text.encode()]
        while len(parts) > 1:
            merges.append((parts[0], parts[1]))
            parts[:2] = [parts[0] + parts[1]]
            vocab.setdefault(parts[0], len(vocab))
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", normalized=False, special=True)])
    tokenizer.add_tokens([AddedToken("<think now>", normalized=False)])
    return _write(Path(folder), tokenizer, {"eos_token": "<|end|>"})


def write_fallback_tokenizer(folder: str | Path) -> Path:
    """In the manner of sentencepiece: words with a visible blank, anything else as its bytes."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁he", "llo", "▁wor", "ld", "a", "é"]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return _write(Path(folder), tokenizer, {})


def _write(folder: Path, tokenizer: Tokenizer, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder

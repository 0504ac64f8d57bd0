"""How text becomes ids, and what bytes an id stands for: one interface over two kinds of files."""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import Any, Protocol

from tokenizers import Tokenizer

# Most characters that a normaliser makes one of; others may shorten a text without limit.
_SHRINKING = {None: 1, "NFC": 4}
_VISIBLE_BLANK = "\u2581"
_FALLBACK_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class TokenCodec(Protocol):
    @property
    def vocab_size(self) -> int:
        """Ids that stand for something, added ones included."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Those that ``skip_special_tokens`` leaves out."""
        ...

    @property
    def is_byte_level(self) -> bool:
        """Whether decoding is joining the bytes of tokens (GPT-2's way): it can be done one by one."""
        ...

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str: ...

    def token_id(self, token: str) -> int | None: ...

    @property
    def has_byte_fallback(self) -> bool:
        """Whether what the vocabulary lacks is spelled by tokens like <0x0A> (sentencepiece's way)."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token of a byte-level vocabulary, or of one with byte fallback (where the blank
        before a text's first word is one of them); empty for an id that it lacks.
        """
        ...

    def fallback_byte(self, token_id: int) -> bytes | None:
        """The byte that a token like <0x0A> stands for, in a vocabulary that has such tokens."""
        ...

    def least_tokens(self, text: str) -> int:
        """So many tokens ``text`` has at least; 0 where only tokenising it could tell."""
        ...


class FastCodec:
    """A ``tokenizer.json``."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}  # of ids that were asked for: making them is most of detokenising

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        return frozenset(i for i, t in self._tokenizer.get_added_tokens_decoder().items() if t.special)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def least_tokens(self, text: str) -> int:
        if self._longest_token is None:
            return 0
        num_certain = len(text) - sum(text.count(character) for character in self._lost_characters)
        return -(-num_certain // self._longest_token)

    @cached_property
    def _longest_token(self) -> int | None:
        """Most characters of a text that one token stands for; None where there is no limit."""
        normalizer = (self._description.get("normalizer") or {}).get("type")
        added = self._tokenizer.get_added_tokens_decoder().values()
        strips = any(token.lstrip or token.rstrip for token in added)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        loses = any(0x80 <= byte < 0xC0 for byte in self._lost_bytes)  # all but the first of a character
        if not self.is_byte_level or normalizer not in _SHRINKING or strips or loses:
            return None
        return _SHRINKING[normalizer] * max(map(len, vocabulary))

    @property
    def _lost_characters(self) -> list[str]:
        """Those that may leave no token at all. One of several bytes leaves the bytes after its first."""
        return [chr(byte) for byte in self._lost_bytes if byte < 0x80]

    @cached_property
    def _lost_bytes(self) -> frozenset[int]:
        """Bytes that a byte-level vocabulary lacks (SmolLM's: bytes that no UTF-8 has, and control codes)."""
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        return frozenset(
            byte for character, byte in _BYTE_OF_CHARACTER.items() if character not in vocabulary
        )

    @cached_property
    def _description(self) -> dict[str, Any]:
        """tokenizer.json's settings, without the vocabulary."""
        whole: dict[str, Any] = json.loads(self._tokenizer.to_str())
        return {name: whole.get(name) for name in ("normalizer", "decoder")}

    @cached_property
    def _decoder_kinds(self) -> tuple[str, ...]:
        decoder = self._description.get("decoder") or {}
        parts = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
        return tuple(part.get("type", "") for part in parts)

    @cached_property
    def is_byte_level(self) -> bool:
        return self._decoder_kinds == ("ByteLevel",)

    @property
    def has_byte_fallback(self) -> bool:
        return "ByteFallback" in self._decoder_kinds

    def fallback_byte(self, token_id: int) -> bytes | None:
        if not self.has_byte_fallback:
            return None
        match = _FALLBACK_TOKEN.fullmatch(self._tokenizer.id_to_token(token_id) or "")
        return None if match is None else bytes.fromhex(match.group(1))

    def token_bytes(self, token_id: int) -> bytes:
        known = self._bytes.get(token_id)
        if known is None:
            token = self._tokenizer.id_to_token(token_id)
            if token is None:
                return b""
            known = self._bytes[token_id] = self._spelled(token, token_id)
        return known

    def _spelled(self, token: str, token_id: int) -> bytes:
        if not self.is_byte_level:
            byte = self.fallback_byte(token_id)
            return token.replace(_VISIBLE_BLANK, " ").encode() if byte is None else byte
        table = _BYTE_OF_CHARACTER
        if all(character in table for character in token):
            return bytes(table[character] for character in token)
        return token.encode()


def _build_byte_table() -> dict[str, int]:
    """GPT-2's printable stand-ins: printable bytes are themselves, the others follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table


_BYTE_OF_CHARACTER = _build_byte_table()

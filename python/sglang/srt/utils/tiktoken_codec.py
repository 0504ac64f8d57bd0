"""Kimi's vocabulary, ``tiktoken.model``, as the ``tokenization_kimi.py`` beside it reads it; that is not run.

The file has a line for every token: its bytes in base64, and its rank, which is its id. The next 256 ids
are special; tokenizer_config.json names some of them. How text is split before byte pairs are merged is
said by Moonshot's code alone, so that rule is written down here, and a checkpoint whose code has another
one is refused.
"""

from __future__ import annotations

import ast
import base64
import binascii
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Final

VOCABULARY_FILE: Final = "tiktoken.model"
TURN_END: Final = "<|im_end|>"  # ends every turn, whatever the config's eos_token is
_CLASS: Final = "TikTokenTokenizer"
_NUM_SPECIAL: Final = 256
_NAMED: Final = ("bos_token", "eos_token", "unk_token", "pad_token")
_LISTED: Final = ("additional_special_tokens", "extra_special_tokens")
_PACKAGE: Final = "tiktoken==0.14.0"

# Letters that begin or go on with a word, Chinese ones excepted: those are words of their own.
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_BEFORE: Final = r"[^\r\n\p{L}\p{N}]?"
_SHORT_FORM: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLIT_RULES: Final = (
    r"[\p{Han}]+",
    f"{_BEFORE}{_UPPER}*{_LOWER}+{_SHORT_FORM}",
    f"{_BEFORE}{_UPPER}+{_LOWER}*{_SHORT_FORM}",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
)

# The code cuts a text into parts that the library takes in time, and so cuts tokens too, far into a text.
_PART_CHARS: Final = 400_000
_RUN_CHARS: Final = 25_000


class TiktokenError(ValueError):
    """Not the files of a vocabulary that is known here; the message goes behind the folder's name."""


class TiktokenCodec:
    def __init__(
        self, ranks: Mapping[bytes, int], special: Mapping[str, int], skipped: frozenset[int]
    ) -> None:
        """``special``: all 256, name -> id; ``skipped``: what ``skip_special_tokens`` leaves out of them.

        Raises:
            TiktokenError: the package tiktoken is not installed.
        """
        try:
            import tiktoken
        except ImportError as error:
            raise TiktokenError(f"{VOCABULARY_FILE} needs a package: pip install {_PACKAGE}") from error
        self._encoding = tiktoken.Encoding(
            name=VOCABULARY_FILE,
            pat_str="|".join(SPLIT_RULES),
            mergeable_ranks=dict(ranks),
            special_tokens=dict(special),
        )
        self._special = dict(special)
        self._skipped = skipped
        self._bytes = {rank: token for token, rank in ranks.items()}
        self._bytes.update({number: name.encode() for name, number in special.items()})

    @property
    def vocab_size(self) -> int:
        return len(self._bytes)

    @property
    def special_ids(self) -> frozenset[int]:
        return self._skipped

    @property
    def has_byte_fallback(self) -> bool:
        return False

    @property
    def is_byte_level(self) -> bool:
        return True

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """``add_special_tokens`` changes nothing: Kimi's texts begin as they are."""
        ids: list[int] = []
        for begin in range(0, len(text), _PART_CHARS):
            for part in split_runs(text[begin : begin + _PART_CHARS], _RUN_CHARS):
                ids += self._encoding.encode(part, allowed_special="all")
        return ids

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        skipped = self._skipped if skip_special_tokens else frozenset()
        return b"".join(self.token_bytes(i) for i in ids if i not in skipped).decode(errors="replace")

    def token_id(self, token: str) -> int | None:
        return self._special.get(token)

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes.get(token_id, b"")

    def fallback_byte(self, token_id: int) -> bytes | None:
        return None

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self._bytes.values()))  # in bytes: a character has at least one

    def least_tokens(self, text: str) -> int:
        return -(-len(text) // self._longest_token)


def split_runs(text: str, most: int) -> Iterator[str]:
    """Parts without more than ``most`` characters in a row that are all blank, or all not."""
    begin = at = 0
    for _, run in groupby(text, str.isspace):
        length = sum(1 for _ in run)
        for cut in range(at + most, at + length, most):
            yield text[begin:cut]
            begin = cut
        at += length
    if begin < at:
        yield text[begin:]


def read_tiktoken(folder: Path, config: Mapping[str, Any]) -> TiktokenCodec:
    """
    Raises:
        TiktokenError: the vocabulary can't be read, or is another model's.
    """
    _check_code(folder, config)
    ranks = _read_ranks(folder / VOCABULARY_FILE)
    names = {
        number: f"<|reserved_token_{number}|>" for number in range(len(ranks), len(ranks) + _NUM_SPECIAL)
    }
    skipped = set()
    for number, name, is_special in _added_tokens(config):
        if number not in names:
            raise TiktokenError(
                f"token {name!r} has id {number}, which is not one of the last {_NUM_SPECIAL}"
            )
        names[number] = name
        if is_special:
            skipped.add(number)
    special = {name: number for number, name in names.items()}
    if len(special) != len(names):
        raise TiktokenError("two special tokens in tokenizer_config.json have one name")
    skipped |= {special[name] for name in _special_names(config) if name in special}
    return TiktokenCodec(ranks, special, frozenset(skipped))


def _read_ranks(file: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        if not line:
            continue
        token, _, rank = line.partition(b" ")
        try:
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (binascii.Error, ValueError) as error:
            raise TiktokenError(
                f"line {number} of {file.name} is not a token in base64 and a rank"
            ) from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise TiktokenError(f"the ranks in {file.name} are not 0 to {len(ranks) - 1}, each once")
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise TiktokenError(f"{file.name} has no token for byte {missing[0]}")
    return ranks


def _added_tokens(config: Mapping[str, Any]) -> Iterator[tuple[int, str, bool]]:
    entries = config.get("added_tokens_decoder") or {}
    if not isinstance(entries, dict):
        raise TiktokenError("added_tokens_decoder in tokenizer_config.json is not an object")
    for number, entry in entries.items():
        name = entry.get("content") if isinstance(entry, dict) else None
        if not str(number).isdecimal() or not isinstance(name, str):
            raise TiktokenError(f"added_tokens_decoder in tokenizer_config.json: {number!r} is no token")
        yield int(number), name, bool(entry.get("special"))


def _special_names(config: Mapping[str, Any]) -> Iterator[str]:
    values = [config.get(name) for name in _NAMED]
    for name in _LISTED:
        listed = config.get(name) or []
        values += listed.values() if isinstance(listed, dict) else listed
    for value in values:
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            yield text


def remote_class(config: Mapping[str, Any]) -> str | None:
    """``module.Class`` of the code that the checkpoint wants to be read by; None if it needs none."""
    auto_map = config.get("auto_map")
    named = auto_map.get("AutoTokenizer") if isinstance(auto_map, dict) else None
    names = named if isinstance(named, list) else [named]
    found = [name for name in names if isinstance(name, str)]
    return found[0].rpartition("--")[2] if found else None


def _check_code(folder: Path, config: Mapping[str, Any]) -> None:
    """It must be the class whose rules are written down above: compared as text, never run."""
    code = remote_class(config)
    module, _, name = (code or f".{config.get('tokenizer_class')}").rpartition(".")
    if name != _CLASS:
        raise TiktokenError(f"{VOCABULARY_FILE} is read by {name} there, and only {_CLASS} is known")
    file = folder / f"{module}.py"
    if not module or not file.is_file():
        return
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError) as error:
        raise TiktokenError(f"{file.name} can't be read: {error}") from error
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    if not strings.issuperset(SPLIT_RULES):
        raise TiktokenError(f"{file.name} splits text by other rules than Kimi-K2's")

"""Text to ids and back, by the files in a folder, never by code in it. Needs no torch and no transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from sglang.srt.utils.tiktoken_codec import (
    TURN_END,
    VOCABULARY_FILE,
    TiktokenCodec,
    read_tiktoken,
    remote_class,
)
from sglang.srt.utils.token_codec import FastCodec, TokenCodec


class TokenizerError(ValueError):
    """The folder has no usable tokenizer; the message is one line for the user."""


class TextTokenizer:
    def __init__(self, codec: TokenCodec, config: dict[str, Any], folder: Path) -> None:
        self._codec = codec
        self.config = config
        self.folder = folder

    @staticmethod
    def from_folder(path: str | Path) -> TextTokenizer:
        folder = Path(path)
        try:
            config = _read_json(folder / "tokenizer_config.json")
            codec = _read_codec(folder, config)
        except TokenizerError:
            raise
        except Exception as error:  # the library raises bare Exception for a file it can't read
            raise TokenizerError(f"the tokenizer in {folder} can't be read: {error}") from error
        return TextTokenizer(codec, config, folder)

    @property
    def vocab_size(self) -> int:
        return self._codec.vocab_size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._codec.encode(text, add_special_tokens)

    def least_tokens(self, text: str) -> int:
        """So many tokens ``text`` has at least; 0 where only tokenising it could tell."""
        return self._codec.least_tokens(text)

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return self._codec.decode(ids, skip_special_tokens)

    def decode_shown(self, ids: list[int]) -> str:
        """As a client sees it that is shown everything, of ids that may begin or end inside a character.

        With byte fallback the library gives up every byte of a run that isn't valid as a whole, those of
        characters that are complete too.
        """
        if not self.has_byte_fallback:
            return self.decode(ids, skip_special_tokens=False)
        text = b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")
        drops_blank = text.startswith(" ") and not self.decode(ids[:1], False).startswith(" ")
        return text[1:] if drops_blank else text

    def token_text(self, token_id: int) -> str:
        """Of one token that may begin or end inside a character."""
        if self.is_byte_level or self.has_byte_fallback:
            return self.token_bytes(token_id).decode("utf-8", errors="replace")
        return self.decode([token_id], skip_special_tokens=False)

    def special_token(self, name: str) -> str | None:
        """``bos_token``, ``eos_token``, … as text."""
        value = self.config.get(name)
        return value.get("content") if isinstance(value, dict) else value

    def special_tokens(self) -> dict[str, str]:
        """Name -> text, of those that are set: what a chat template may use."""
        names = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
        return {name: text for name in names if (text := self.special_token(name)) is not None}

    def token_id(self, token: str) -> int | None:
        return self._codec.token_id(token)

    @property
    def eos_token_id(self) -> int | None:
        text = self.special_token("eos_token")
        return None if text is None else self.token_id(text)

    @property
    def is_kimi(self) -> bool:
        """Whether it is read by rules that Moonshot's code has, and no file."""
        return isinstance(self._codec, TiktokenCodec)

    def stop_ids(self, of_model: tuple[int, ...]) -> tuple[int, ...]:
        """Ids that end a reply: ``of_model`` (from the model's files), and those that the tokenizer knows."""
        own = [self.eos_token_id, self.token_id(TURN_END) if self.is_kimi else None]
        return tuple(dict.fromkeys([*of_model, *(number for number in own if number is not None)]))

    @property
    def special_ids(self) -> frozenset[int]:
        return self._codec.special_ids

    @property
    def is_byte_level(self) -> bool:
        """Whether decoding is joining the bytes of tokens (GPT-2's way): it can be done one by one."""
        return self._codec.is_byte_level

    def fallback_byte(self, token_id: int) -> bytes | None:
        """The byte that a token like <0x0A> stands for, in a tokenizer that has such tokens."""
        return self._codec.fallback_byte(token_id)

    @property
    def has_byte_fallback(self) -> bool:
        """Whether what the vocabulary lacks is spelled by tokens like <0x0A> (sentencepiece's way)."""
        return self._codec.has_byte_fallback

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token, if it ``is_byte_level`` or ``has_byte_fallback``; empty for one it lacks."""
        return self._codec.token_bytes(token_id)


def _read_codec(folder: Path, config: dict[str, Any]) -> TokenCodec:
    file = folder / "tokenizer.json"
    if file.is_file():
        return FastCodec(Tokenizer.from_file(str(file)))
    if (folder / VOCABULARY_FILE).is_file():
        return read_tiktoken(folder, config)
    code = remote_class(config)
    if code is not None:
        raise TokenizerError(
            f"the tokenizer in {folder} is code ({code}), and code from a checkpoint is never run here:"
            " give the folder of one with a tokenizer.json with --tokenizer-path"
        )
    raise TokenizerError(
        f"no tokenizer.json in {folder}: give the folder of a fast tokenizer with --tokenizer-path"
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} is not a JSON object")
    return value

"""The model's tokenizer, from its folder or by its name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from huggingface_hub import try_to_load_from_cache

from sglang.benchmark.prompt_row import DatasetError, Message
from sglang.srt.managers.chat_templates import ChatTemplate, load_chat_template
from sglang.srt.managers.text_request import RequestError
from sglang.srt.utils.text_tokenizer import TextTokenizer

_NO_TEMPLATE = "the tokenizer has no chat template: use a data set of plain texts"


class FolderTokenizer:
    """A folder's `tokenizer.json`, read as our server reads it. Needs neither torch nor transformers."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = TextTokenizer.from_folder(folder)
        self._template: ChatTemplate | None = load_chat_template(self._tokenizer, None)

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.vocab_size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens)

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens)

    def special_ids(self) -> frozenset[int]:
        return self._tokenizer.special_ids

    def apply_chat_template(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None) -> str:
        """The text that the model continues as the assistant.

        Raises:
            DatasetError: the model has no chat template, or it refuses these messages.
        """
        if self._template is None:
            raise DatasetError(_NO_TEMPLATE)
        try:
            return self._template.render(messages, tools=tools)
        except RequestError as error:
            raise DatasetError(str(error)) from error


class NamedTokenizer:
    """One that only `transformers` can read: a folder of another kind, or a model in its cache."""

    def __init__(self, name: str, trust_remote_code: bool) -> None:
        # Only now: it brings torch, and takes seconds.
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(
            name, trust_remote_code=trust_remote_code, local_files_only=True
        )

    @property
    def vocab_size(self) -> int:
        return len(self._tokenizer)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return cast(list[int], self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return cast(str, self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def special_ids(self) -> frozenset[int]:
        return frozenset(self._tokenizer.all_special_ids)

    def apply_chat_template(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None) -> str:
        """As FolderTokenizer's."""
        if not self._tokenizer.chat_template:
            raise DatasetError(_NO_TEMPLATE)
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # whatever the template's own code raises
            raise DatasetError(f"the chat template refuses these messages: {error}") from error
        return cast(str, text)


def _cached(name: str) -> Path:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        found = try_to_load_from_cache(name, file)
        if isinstance(found, str):
            return Path(found).parent
    raise FileNotFoundError("not a folder, and not in Hugging Face's cache")


def load_tokenizer(where: str | Path, trust_remote_code: bool = False) -> FolderTokenizer | NamedTokenizer:
    """The tokenizer in a folder, or of a model in Hugging Face's cache by its name. Nothing is downloaded.

    Raises:
        DatasetError: there is none that can be read.
    """
    folder = Path(where)
    try:
        if not folder.is_dir():
            folder = _cached(str(where))
        if (folder / "tokenizer.json").is_file():
            return FolderTokenizer(folder)
        return NamedTokenizer(str(where), trust_remote_code)
    except Exception as error:  # both libraries raise many kinds
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise DatasetError(
            f"no tokenizer for {where} ({reason}): give the model's folder with --tokenizer"
        ) from error

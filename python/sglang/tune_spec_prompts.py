"""Prompts for `tune_spec`: a file of the user's, or those that ship."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from sglang.benchmark.prompt_row import DatasetOptions
from sglang.srt.utils.flags import ServerArgsError
from sglang.srt.utils.text_tokenizer import TextTokenizer

SHIPPED = ("humaneval", "chat")


def prompt_ids(file: Path | None, tokenizer: TextTokenizer, count: int, most: int) -> list[list[int]]:
    """Ids of at most ``count`` prompts that have at most ``most`` each.

    Raises:
        ServerArgsError: the file can't be read, or none of its prompts is short enough.
        DatasetError: the shipped ones can't be made for this model.
    """
    if file is None:
        found = _shipped(tokenizer, count)
        where = "the shipped prompts"
    else:
        found = [_encode(tokenizer, text, templated) for text, templated in _read(file, tokenizer)]
        where = f"--prompts {file}"
    short = [ids for ids in found if 0 < len(ids) <= most]
    if not short:
        raise ServerArgsError(f"{where}: no prompt has between 1 and {most} tokens")
    return short[:count]


def _shipped(tokenizer: TextTokenizer, count: int) -> list[list[int]]:
    """One of each kind in turn."""
    # Only now: chat templates need packages that a file of texts does not.
    from sglang.benchmark.datasets import load
    from sglang.benchmark.tokenizer import FolderTokenizer

    options = DatasetOptions(
        num_prompts=-(-count // len(SHIPPED)), tokenizer=FolderTokenizer(tokenizer.folder), held_out=True
    )
    rows = chain.from_iterable(zip(*(load(name, options) for name in SHIPPED), strict=True))
    return [_encode(tokenizer, str(row.prompt), True) for row in rows]


def _encode(tokenizer: TextTokenizer, text: str, templated: bool) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=not templated)


def _read(file: Path, tokenizer: TextTokenizer) -> list[tuple[str, bool]]:
    """Texts, and whether they are whole conversations in the model's template."""
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ServerArgsError(f"--prompts {file} can't be read: {error}") from error
    if not lines:
        raise ServerArgsError(f"--prompts {file} has no prompts")
    if file.suffix not in (".jsonl", ".json"):
        return [(line, False) for line in lines]
    return [_parse(f"--prompts {file}, line {n}", line, tokenizer) for n, line in enumerate(lines, start=1)]


def _parse(where: str, line: str, tokenizer: TextTokenizer) -> tuple[str, bool]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ServerArgsError(f"{where} is no JSON ({error}): a file of plain texts ends in .txt") from None
    if isinstance(row, dict) and isinstance(row.get("messages"), list):
        return _templated(row["messages"], row.get("tools"), tokenizer), True
    text = row.get("text", row.get("prompt")) if isinstance(row, dict) else row
    if not isinstance(text, str):
        raise ServerArgsError(f'{where} needs {{"text": ...}} or {{"messages": [...]}}, got {line[:80]}')
    return text, False


def _templated(messages: Sequence[dict[str, Any]], tools: Any, tokenizer: TextTokenizer) -> str:
    # Only now: see above.
    from sglang.benchmark.tokenizer import FolderTokenizer

    return FolderTokenizer(tokenizer.folder).apply_chat_template(messages, tools)

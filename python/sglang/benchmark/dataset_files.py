"""Prompts from a user's file: ShareGPT's format, JSONL of conversations, JSONL of OpenAI requests."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, Final

from sglang.benchmark.prompt_row import DatasetError, DatasetOptions, Message, PromptRow

SHAREGPT_HINT: Final = (
    "give a file in ShareGPT's format with --dataset-path (a JSON list of conversations, such as"
    " ShareGPT_V3_unfiltered_cleaned_split.json of the data set anon8231489123/ShareGPT_Vicuna_unfiltered on"
    " Hugging Face); nothing is downloaded here. Data sets that need no file: random, random-ids,"
    " generated-shared-prefix, humaneval, bfcl, chat"
)
DEFAULT_MAX_TOKENS: Final = 256  # of an OpenAI request that says nothing
_NOT_EXTRA: Final = frozenset({"messages", "max_tokens", "max_completion_tokens", "model", "stream", "tools"})
_LEAST_TOKENS: Final = 2  # of a recorded prompt, and of its answer

Turn = tuple[str, str]  # prompt, answer


def sharegpt(options: DatasetOptions) -> list[PromptRow]:
    """First turns of recorded conversations; an answer is as long as the recorded one."""
    if options.dataset_path is None:
        raise DatasetError(f"the sharegpt data set is a file: {SHAREGPT_HINT}")
    return _recorded(sharegpt_turns(options.dataset_path), "sharegpt", options)


def custom(options: DatasetOptions) -> list[PromptRow]:
    """The same from JSONL: {"conversations": [{"content": prompt}, {"content": answer}]} a line."""
    path = _need_path(options, "custom", '{"conversations": [{"content": ...}, {"content": ...}]}')
    return _recorded([turn for row in _lines(path) if (turn := _first_turn(row))], "custom", options)


def openai(options: DatasetOptions) -> list[PromptRow]:
    """Chat requests from JSONL: {"messages": [...], "max_tokens": n, ...} a line, in the file's order.

    Whatever else a line has (tools, temperature, ...) goes into its request.
    """
    path = _need_path(options, "openai", '{"messages": [...], "max_tokens": ...}')
    rows = []
    for number, row in enumerate(_lines(path), 1):
        messages = row.get("messages")
        if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages) or not messages:
            raise DatasetError(f"line {number} of {path} has no list of messages")
        rows.append(_openai_row(row, messages, options))
    return rows


def sharegpt_turns(path: Path) -> list[Turn]:
    """
    Raises:
        DatasetError: the file can't be read, or is of another format.
    """
    try:
        rows = json.loads(_text(path))
    except json.JSONDecodeError as error:
        raise DatasetError(f"{path} is not JSON ({error}): {SHAREGPT_HINT}") from error
    if not isinstance(rows, list):
        raise DatasetError(f"{path} is not a JSON list: {SHAREGPT_HINT}")
    turns = [turn for row in rows if isinstance(row, dict) and (turn := _first_turn(row))]
    if not turns:
        raise DatasetError(f"{path} has no conversation of two turns: {SHAREGPT_HINT}")
    return turns


def _first_turn(row: dict[str, Any]) -> Turn | None:
    said = row.get("conversations") or row.get("conversation") or []
    found = [turn.get("value", turn.get("content")) for turn in said[:2] if isinstance(turn, dict)]
    texts = [text for text in found if isinstance(text, str)]
    return (texts[0], texts[1]) if len(texts) == 2 else None


def _recorded(turns: list[Turn], domain: str, options: DatasetOptions) -> list[PromptRow]:
    if options.output_len is None:
        options.need_tokenizer(f"{domain} (without --sharegpt-output-len)")
    random.Random(options.seed).shuffle(turns)
    rows: list[PromptRow] = []
    for question, answer in turns:
        if len(rows) == options.num_prompts:
            break
        row = _recorded_row(question, answer, domain, options)
        length = row.prompt_len + row.output_len
        short = options.tokenizer and min(row.prompt_len, row.output_len) < _LEAST_TOKENS
        if not short and (options.context_len is None or length <= options.context_len):
            rows.append(row)
    return rows


def _recorded_row(question: str, answer: str, domain: str, options: DatasetOptions) -> PromptRow:
    messages: list[Message] = [{"role": "user", "content": question}]
    text = question
    if options.apply_chat_template:
        text = options.need_tokenizer(domain).apply_chat_template(messages, None)
    length = options.output_len or options.count(answer)
    return PromptRow(text, options.count(text), length, messages, domain)


def _openai_row(row: dict[str, Any], messages: list[Message], options: DatasetOptions) -> PromptRow:
    tools = row.get("tools")
    length = options.output_len or row.get("max_tokens") or row.get("max_completion_tokens")
    extra = {name: value for name, value in row.items() if name not in _NOT_EXTRA}
    length = length or DEFAULT_MAX_TOKENS
    if options.tokenizer is None:
        return PromptRow(messages, 0, length, messages, "openai", tools, extra)
    text = options.tokenizer.apply_chat_template(messages, tools)
    return PromptRow(text, options.count(text), length, messages, "openai", tools, extra)


def _need_path(options: DatasetOptions, name: str, form: str) -> Path:
    if options.dataset_path is None:
        raise DatasetError(f"the {name} data set is a file: give --dataset-path FILE with lines like {form}")
    return options.dataset_path


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DatasetError(f"--dataset-path {path} can't be read: {reason}") from error


def _lines(path: Path) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DatasetError(f"line {number} of {path} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise DatasetError(f"line {number} of {path} is not a JSON object")
        rows.append(row)
    return rows

"""Prompts of the study: the data sets of ``sglang.benchmark``, with the model's chat template applied."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Final

from benchmark.spec_toggle.prompts import Prompt
from sglang.benchmark.datasets import DatasetOptions, load
from sglang.benchmark.prompt_row import Tokenizer
from sglang.benchmark.tokenizer import load_tokenizer

FIXED_REQUEST: Final = (
    "Write a Python class for a binary search tree with insert, delete, search and in-order traversal, with"
    " type hints and docstrings. Then explain how each method works."
)


def load_prompts(names: Sequence[str], tokenizer: str, options: DatasetOptions) -> dict[str, list[Prompt]]:
    """Return the prompts by domain. Without a tokenizer they are message lists, for chat endpoints.

    Raises:
        DatasetError: no such data set, or no such tokenizer.
    """
    if tokenizer:
        options = replace(options, tokenizer=_tokenizer(tokenizer), apply_chat_template=True)
    found: dict[str, list[Prompt]] = {}
    for name in names:
        for index, row in enumerate(load(name, options)):
            text = row.prompt if isinstance(row.prompt, str) else ""
            prompt = Prompt(f"{name}-{index:03d}", row.domain or name, text, tuple(row.chat_messages()))
            found.setdefault(prompt.domain, []).append(prompt)
    return found


def fixed_prompt(tokenizer: str) -> Prompt:
    """Return the prompt that a single stream repeats."""
    messages = [{"role": "user", "content": FIXED_REQUEST}]
    text = _tokenizer(tokenizer).apply_chat_template(messages, None) if tokenizer else ""
    return Prompt("fixed", "fixed", text, tuple(messages))


@cache
def _tokenizer(folder: str) -> Tokenizer:
    return load_tokenizer(folder)

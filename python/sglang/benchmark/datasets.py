"""Prompts for the serving benchmarks: ``load(name, options)``.

    rows = load("humaneval", DatasetOptions(num_prompts=64, tokenizer=load_tokenizer(folder)))

Without a tokenizer the data sets that are conversations give message lists (for chat endpoints).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from sglang.benchmark.dataset_files import custom, openai, sharegpt
from sglang.benchmark.dataset_random import random_ids, random_text, shared_prefix
from sglang.benchmark.dataset_shipped import bfcl, chat, humaneval
from sglang.benchmark.prompt_row import DatasetError, DatasetOptions, PromptRow

__all__ = ["DATASETS", "DatasetError", "DatasetOptions", "PromptRow", "load"]

DATASETS: Final[Mapping[str, Callable[[DatasetOptions], list[PromptRow]]]] = MappingProxyType(
    {
        "sharegpt": sharegpt,
        "random": random_text,
        "random-ids": random_ids,
        "generated-shared-prefix": shared_prefix,
        "custom": custom,
        "openai": openai,
        "humaneval": humaneval,
        "bfcl": bfcl,
        "chat": chat,
    }
)


def load(name: str, options: DatasetOptions) -> list[PromptRow]:
    """``options.num_prompts`` rows; a data set with fewer is gone round again.

    `generated-shared-prefix` alone says itself how many it has: groups times prompts a group.

    Raises:
        DatasetError: there is no such data set, or it can't be made.
    """
    if name not in DATASETS:
        raise DatasetError(f"there is no data set {name}: choose one of {', '.join(DATASETS)}")
    if options.num_prompts < 1:
        raise DatasetError(f"at least one prompt is needed, got {options.num_prompts}")
    rows = DATASETS[name](options)
    if options.context_len is not None:
        rows = [r for r in rows if r.prompt_len + r.output_len <= options.context_len]
    if not rows:
        limit = f" of at most {options.context_len} tokens" if options.context_len else ""
        raise DatasetError(f"the {name} data set has no prompt{limit}")
    if name == "generated-shared-prefix":
        return rows
    return [rows[i % len(rows)] for i in range(options.num_prompts)]

"""Executors over tiny random models, float64 unless told otherwise; folders are written once."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from helpers.quantise import FORMATS, write_quantised
from helpers.tiny_drafters import write_tiny_companion, write_tiny_eagle3_mla, write_tiny_speculators
from helpers.tiny_mla import (
    write_tiny_deepseek_v2,
    write_tiny_deepseek_v3,
    write_tiny_deepseek_v32,
    write_tiny_glm4_moe_lite,
    write_tiny_glm5,
    write_tiny_kimi_k25,
)
from helpers.tiny_models import (
    write_tiny_eagle3,
    write_tiny_llama,
    write_tiny_mistral,
    write_tiny_qwen2,
    write_tiny_qwen3,
)
from helpers.tiny_moe import write_tiny_glm4_moe, write_tiny_gpt_oss, write_tiny_qwen3_moe

from sglang.srt.configs.executor_args import ExecutorArgs
from sglang.srt.managers.executor_build import build_executor
from sglang.srt.model_executor.in_process_executor import InProcessExecutor

WRITERS = {
    "llama": write_tiny_llama,
    "mistral": write_tiny_mistral,
    "mistral-window": partial(write_tiny_mistral, sliding_window=24),
    "qwen2": write_tiny_qwen2,
    "qwen3": write_tiny_qwen3,
    "qwen3-moe": write_tiny_qwen3_moe,
    "glm4-moe": write_tiny_glm4_moe,
    "gpt-oss": write_tiny_gpt_oss,
    "deepseek-v2": write_tiny_deepseek_v2,
    "deepseek-v3": write_tiny_deepseek_v3,
    "deepseek-v3.2": write_tiny_deepseek_v32,
    "kimi-k2.5": write_tiny_kimi_k25,
    "glm-4.7-flash": write_tiny_glm4_moe_lite,
    "glm-5": write_tiny_glm5,
}
CONTEXT = 1024


@cache
def _root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="tiny_models_")  # removed when the process ends


@cache
def target_folder(family: str = "llama", vocab_size: int = 256) -> Path:
    """``family``: one of WRITERS, or quantised: with a name of helpers.quantise.FORMATS ("llama:int4")."""
    folder = Path(_root().name) / f"{family}-{vocab_size}"
    family, _, form = family.partition(":")
    if form:
        return write_quantised(target_folder(family, vocab_size), folder, FORMATS[form])[0]
    return WRITERS[family](folder, vocab_size=vocab_size, max_position_embeddings=CONTEXT)


@cache
def draft_folder(family: str = "llama", vocab_size: int = 256, draft_vocab: int | None = 128) -> Path:
    folder = Path(_root().name) / f"{family}-{vocab_size}-eagle3-{draft_vocab}"
    family, _, form = family.partition(":")
    if form:  # quantised as its target
        return write_quantised(draft_folder(family, vocab_size, draft_vocab), folder, FORMATS[form])[0]
    return write_tiny_eagle3(folder, target_folder(family, vocab_size), draft_vocab=draft_vocab)


@cache
def drafter_folder(kind: str, family: str) -> Path:
    """``kind``: one of DRAFTERS that has a folder."""
    return DRAFTERS[kind](Path(_root().name) / f"{family}-{kind}", target_folder(family))


DRAFTERS: dict[str, Callable[[Path, Path], Path]] = {
    "eagle3-mla": write_tiny_eagle3_mla,
    "speculators": write_tiny_speculators,
    "speculators-qwen3": partial(write_tiny_speculators, qwen3=True),
    "standalone": write_tiny_companion,
}
KINDS = {"nextn": "NEXTN", "ngram": "NGRAM", "standalone": "STANDALONE"}


def tiny_executor(
    shape: tuple[int, int, int] | None = None,  # steps, topk, draft tokens; None: no drafter
    family: str = "llama",
    vocab_size: int = 256,
    draft_vocab: int | None = 128,
    drafter: str = "eagle3",  # or of DRAFTERS and KINDS
    **args: Any,
) -> InProcessExecutor:
    defaults: dict[str, Any] = {
        "dtype": "float64",
        "max_total_tokens": 4096,
        "max_running_requests": 8,
        "context_length": 1000,
    }
    if shape is not None:
        if drafter == "eagle3":
            defaults["draft_model_path"] = str(draft_folder(family, vocab_size, draft_vocab))
        elif drafter in DRAFTERS:
            defaults["draft_model_path"] = str(drafter_folder(drafter, family))
        defaults |= {
            "draft_kind": KINDS.get(drafter),
            "num_steps": shape[0],
            "topk": shape[1],
            "num_draft_tokens": shape[2],
        }
    return build_executor(ExecutorArgs(str(target_folder(family, vocab_size)), **(defaults | args)))

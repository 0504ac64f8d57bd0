"""Flags that choose the prompts, for every benchmark that has a choice."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sglang.benchmark.datasets import DATASETS, load
from sglang.benchmark.prompt_row import DatasetOptions, PromptRow, Tokenizer
from sglang.srt.utils.flags import ServerArgsError, flag

_GROUP: Final = "prompts"
_NO_IMAGES: Final = "only text is served: choose a data set of texts, or leave it out"
_NO_TRACES: Final = "replay arrivals from a file with benchmark/spec_toggle/replay.py"
_OTHER: Final = "bring the data with --dataset-name custom or openai and --dataset-path"
UNKNOWN_DATASETS: Final = {
    **dict.fromkeys(("mmmu", "image"), _NO_IMAGES),
    **dict.fromkeys(("mooncake", "agentic-trace"), f"{_NO_TRACES}; bfcl has conversations of agents"),
    **dict.fromkeys(("longbench_v2", "speed-bench"), _OTHER),
}


@dataclass(frozen=True, slots=True)
class DatasetFlags:
    dataset_name: str = flag("sharegpt", str, _GROUP, f"one of: {', '.join(DATASETS)}")
    dataset_path: str | None = flag(None, str, _GROUP, "file of the sharegpt, custom, openai and random sets")
    num_prompts: int = flag(1000, int, _GROUP, "requests; a set with fewer prompts is gone round again")
    seed: int = flag(42, int, _GROUP, "for prompts and arrivals")
    apply_chat_template: bool = flag(False, bool, _GROUP, "recorded prompts become a user turn of a chat")
    sharegpt_output_len: int | None = flag(
        None, int, _GROUP, "tokens of every answer, instead of the recorded answer's (any data set)"
    )
    sharegpt_context_len: int | None = flag(
        None, int, _GROUP, "leave out prompts that are longer with their answer (any data set)"
    )
    random_input_len: int = flag(1024, int, _GROUP, "tokens of a random prompt")
    random_output_len: int = flag(1024, int, _GROUP, "tokens of its answer")
    random_range_ratio: float = flag(0.0, float, _GROUP, "lengths are from this part of those up to them")
    gsp_num_groups: int = flag(64, int, _GROUP, "generated-shared-prefix: system prompts")
    gsp_prompts_per_group: int = flag(16, int, _GROUP, "prompts with the same one")
    gsp_system_prompt_len: int = flag(2048, int, _GROUP, "tokens of a system prompt")
    gsp_question_len: int = flag(128, int, _GROUP, "tokens that a prompt has of its own")
    gsp_output_len: int = flag(256, int, _GROUP, "tokens of its answer")
    held_out: bool = flag(
        False, bool, _GROUP, "humaneval: only problems that the embedded model's drafter was not trained on"
    )
    bfcl_max_tools: int | None = flag(None, int, _GROUP, "bfcl: at most so many functions a conversation")
    bfcl_native_tools: bool = flag(
        False, bool, _GROUP, "bfcl: send functions and calls as the OpenAI API has them, not as text"
    )


def check_dataset_flags(flags: DatasetFlags) -> None:
    """
    Raises:
        ServerArgsError: they can't be met, whatever the model is.
    """
    name = flags.dataset_name
    if name not in DATASETS:
        hint = UNKNOWN_DATASETS.get(name, f"choose one of {', '.join(DATASETS)}")
        raise ServerArgsError(f"there is no data set {name} here: {hint}")
    if flags.num_prompts < 1:
        raise ServerArgsError(f"--num-prompts must be at least 1, got {flags.num_prompts}")
    for option, value in (
        ("--sharegpt-output-len", flags.sharegpt_output_len),
        ("--sharegpt-context-len", flags.sharegpt_context_len),
        ("--bfcl-max-tools", flags.bfcl_max_tools),
    ):
        if value is not None and value < 1:
            raise ServerArgsError(f"{option} must be at least 1, got {value}")


def load_rows(
    flags: DatasetFlags, tokenizer: Tokenizer | None, tokenize_prompt: bool = False
) -> list[PromptRow]:
    """
    Raises:
        DatasetError: the data set can't be made.
    """
    options = DatasetOptions(
        num_prompts=flags.num_prompts,
        seed=flags.seed,
        tokenizer=tokenizer,
        dataset_path=Path(flags.dataset_path) if flags.dataset_path else None,
        apply_chat_template=flags.apply_chat_template,
        output_len=flags.sharegpt_output_len,
        context_len=flags.sharegpt_context_len,
        random_input_len=flags.random_input_len,
        random_output_len=flags.random_output_len,
        random_range_ratio=flags.random_range_ratio,
        tokenize_prompt=tokenize_prompt,
        gsp_num_groups=flags.gsp_num_groups,
        gsp_prompts_per_group=flags.gsp_prompts_per_group,
        gsp_system_prompt_len=flags.gsp_system_prompt_len,
        gsp_question_len=flags.gsp_question_len,
        gsp_output_len=flags.gsp_output_len,
        held_out=flags.held_out,
        native_tools=flags.bfcl_native_tools,
        max_tools=flags.bfcl_max_tools,
    )
    return load(flags.dataset_name, options)

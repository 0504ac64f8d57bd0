"""The command line of `bench_one_batch_server`: its own flags, and the server's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final

from sglang.benchmark.dataset_flags import UNKNOWN_DATASETS
from sglang.benchmark.datasets import DATASETS
from sglang.benchmark.refused_flags import refused_flags
from sglang.srt.utils.flags import ServerArgsError, build_parser, flag, refuse_empty

PROG: Final = "python -m sglang.bench_one_batch_server"
DESCRIPTION: Final = (
    "Send one static batch to a server and time it. With --base-url the server is one that runs; without it"
    " one is started with all other flags, which are those of sglang.launch_server."
)
_CASES: Final = "cases"
_SERVER: Final = "server"
_PROMPTS: Final = "prompts"
_OUT: Final = "output"
_MODEL_FLAGS: Final = ("--model", "--model-path")  # upstream's examples give one beside --base-url


@dataclass(frozen=True, slots=True)
class OneBatchFlags:
    batch_size: tuple[int, ...] = flag((1,), int, _CASES, "prompts of a batch", many=True)
    input_len: tuple[int, ...] = flag((1024,), int, _CASES, "tokens of a random prompt", many=True)
    output_len: tuple[int, ...] = flag((16,), int, _CASES, "tokens of an answer", many=True)
    cache_hit_rate: float = flag(0.0, float, _CASES, "this part of every prompt is in the prefix cache")
    parallel_batch: bool = flag(False, bool, _CASES, "a request for each prompt, instead of one for all")
    temperature: float = flag(0.0, float, _CASES, "of sampling; 0: greedy")
    disable_ignore_eos: bool = flag(False, bool, _CASES, "answers may end before their length")
    skip_warmup: bool = flag(False, bool, _CASES, "measure the first case without running it before")

    base_url: str | None = flag(None, str, _SERVER, "a server that runs")
    backend: str = flag("sglang", str, _SERVER, "its kind", choices=("sglang", "vllm"))
    local_tokenizer_path: str | None = flag(None, str, _SERVER, "the tokenizer (default: the server's)")

    dataset_name: str = flag("random", str, _PROMPTS, f"one of: {', '.join(DATASETS)}")
    dataset_path: str | None = flag(None, str, _PROMPTS, "file of the sharegpt, custom and openai sets")
    fixed_prompt_file: str | None = flag(None, str, _PROMPTS, "its text is every prompt")
    apply_chat_template: bool = flag(False, bool, _PROMPTS, "texts become a user turn of a chat")
    seed: int = flag(42, int, _PROMPTS, "for prompts")
    gsp_num_groups: int = flag(1, int, _PROMPTS, "generated-shared-prefix: system prompts")
    gsp_system_prompt_len: int = flag(2048, int, _PROMPTS, "tokens of a system prompt")
    gsp_question_len: int = flag(128, int, _PROMPTS, "tokens that a prompt has of its own")

    run_name: str = flag("default", str, _OUT, "written into the records")
    result_filename: str = flag("result.jsonl", str, _OUT, "records are appended to it")


def parse(argv: Sequence[str]) -> tuple[OneBatchFlags, list[str]]:
    """The benchmark's flags, and the words that are the server's.

    Raises:
        ServerArgsError: the flags can't be taken as they are.
    """
    refused = refused_flags()
    for word in argv:
        if (option := word.partition("=")[0]) in refused:
            raise ServerArgsError(refused[option])
    parsed, rest = build_parser(OneBatchFlags, PROG, DESCRIPTION).parse_known_args(list(argv))
    values = vars(parsed)
    refuse_empty(OneBatchFlags, values)
    taken = {f.name: values[f.name] for f in fields(OneBatchFlags)}
    for name in ("batch_size", "input_len", "output_len"):
        taken[name] = tuple(taken[name])
    flags = OneBatchFlags(**taken)
    _check(flags)
    return flags, _without_model(rest) if flags.base_url else rest


def _check(flags: OneBatchFlags) -> None:
    for name in ("batch_size", "input_len", "output_len"):
        if (least := min(getattr(flags, name))) < 1:
            raise ServerArgsError(f"--{name.replace('_', '-')} must be at least 1, got {least}")
    if not 0 <= flags.cache_hit_rate <= 1:
        raise ServerArgsError(f"--cache-hit-rate must be from 0 to 1, got {flags.cache_hit_rate}")
    if flags.dataset_name not in DATASETS:
        hint = UNKNOWN_DATASETS.get(flags.dataset_name, f"choose one of {', '.join(DATASETS)}")
        raise ServerArgsError(f"there is no data set {flags.dataset_name} here: {hint}")
    if flags.base_url and not flags.base_url.startswith(("http://", "https://")):
        raise ServerArgsError(f"--base-url must begin with http:// or https://, got {flags.base_url}")
    if flags.backend == "vllm" and not flags.base_url:
        raise ServerArgsError("--backend vllm needs --base-url: only this package's server can be started")


def _without_model(rest: Sequence[str]) -> list[str]:
    """
    Raises:
        ServerArgsError: something else is left for a server that runs already.
    """
    words = list(rest)
    for name in _MODEL_FLAGS:
        if name in words:
            place = words.index(name)
            del words[place : place + 2]
    if words:
        raise ServerArgsError(f"{words[0]} is a flag for starting a server: leave it out with --base-url")
    return words

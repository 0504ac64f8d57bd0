"""Find the shape of speculation for a model, a drafter and prompts, and when not to speculate.

    python -m sglang.tune_spec --prompts prompts.jsonl --save auto.json
    python -m sglang.tune_spec --model-path M --speculative-draft-model-path D --shapes 5,1,6 3,4,8

For every shape (steps, topk, draft tokens) the steps of all draft lengths are timed and the prompts are
answered with speculation on; from both follow the expected tokens per second at each batch size, the best
shape, the best threshold and a schedule. A chain (topk 1) tells of all shorter ones too. Flags of
``sglang.launch_server`` choose the model; without ``--model-path`` it is the embedded one.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from sglang.srt.utils.openmp import spin_briefly

spin_briefly()  # before the imports that bring torch

# ruff: noqa: E402
from sglang.benchmark.prompt_row import DatasetError
from sglang.srt.configs.model_config import ModelConfig, ModelConfigError
from sglang.srt.configs.speculative_args import EAGLE3
from sglang.srt.managers.executor_build import ExecutorArgsError
from sglang.srt.managers.executor_settings import DEFAULT_RUNNING_REQUESTS
from sglang.srt.model_executor.memory import OutOfMemoryError
from sglang.srt.model_executor.step_plan import SpecShape
from sglang.srt.model_loader.weight_source import WeightError
from sglang.srt.sampling.sampling_params import SamplingParams, SamplingParamsError
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.auto_table import AutoTable
from sglang.srt.utils.flags import ServerArgsError, exit_with_error
from sglang.srt.utils.text_tokenizer import TextTokenizer, TokenizerError
from sglang.tune_spec_choice import ShapeFigures, choose_best
from sglang.tune_spec_measure import Measured, measure_shape, with_shape
from sglang.tune_spec_prompts import prompt_ids
from sglang.tune_spec_report import report

PROG = "python -m sglang.tune_spec"
DEFAULT_SHAPES = ("5,1,6", "3,4,8")
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SWEPT = {
    "speculative_num_steps": "--shapes",
    "speculative_eagle_topk": "--shapes",
    "speculative_num_draft_tokens": "--shapes",
    "speculative_disable_bs_threshold": "nothing: it is what is looked for",
    "speculative_bs_schedule": "nothing: it is what is looked for",
    "speculative_auto_table": "--save, to write one",
}
USER_ERRORS = (
    ServerArgsError, ModelConfigError, ExecutorArgsError, OutOfMemoryError, WeightError, TokenizerError,
    SamplingParamsError, DatasetError,
)  # fmt: skip


def parse_shape(text: str) -> SpecShape:
    """``STEPS,TOPK,DRAFT_TOKENS``, or ``STEPS`` of a chain."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 3) or min(numbers) < 1:
        raise ServerArgsError(
            f"--shapes takes STEPS,TOPK,DRAFT_TOKENS (as 3,4,8), or STEPS of a chain (as 3); got {text!r}"
        )
    return SpecShape(*numbers)


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, ServerArgs]:
    """The server's arguments are those of the model alone: not resolved, without a shape."""
    parser = argparse.ArgumentParser(
        prog=PROG, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--prompts", type=Path,
        help='a text a line, or JSON lines of {"text": ...} or {"messages": [...]} (default: code and chat'
        " that ship with this program)",
    )  # fmt: skip
    parser.add_argument("--num-prompts", type=int, default=64, help="of the file, from its first line on")
    parser.add_argument("--output-len", type=int, default=128, help="most tokens of an answer")
    parser.add_argument("--shapes", nargs="+", default=DEFAULT_SHAPES, metavar="STEPS,TOPK,DRAFT_TOKENS")
    parser.add_argument(
        "--batch-sizes", type=int, nargs="+", help="of equal weight (default: 1, 2, 4 … as many as can run)"
    )
    parser.add_argument(
        "--cost-seconds", type=float, default=60.0, help="that timing the steps of one shape may take"
    )
    parser.add_argument("--context", type=int, help="tokens of a row (default: as the prompts have it)")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=-1)
    parser.add_argument("--save", type=Path, metavar="FILE", help="table for --speculative-auto-table")
    parser.add_argument("--result-filename", type=Path, help="JSON lines, one a shape, are appended to it")
    flags, rest = parser.parse_known_args(argv)
    for name in ("num_prompts", "output_len"):
        if (value := getattr(flags, name)) < 1:
            raise ServerArgsError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if flags.batch_sizes and min(flags.batch_sizes) < 1:
        raise ServerArgsError(f"--batch-sizes must be at least 1, got {min(flags.batch_sizes)}")
    if flags.save is not None and not flags.save.parent.is_dir():
        raise ServerArgsError(f"--save {flags.save}: there is no folder {flags.save.parent}")
    return flags, _model_args(ServerArgs.from_command_line(rest, PROG))


def _model_args(given: ServerArgs) -> ServerArgs:
    for name, instead in SWEPT.items():
        if getattr(given, name) is not None:
            raise ServerArgsError(f"--{name.replace('_', '-')} can't be given here; use {instead}")
    if given.model_path is None:
        # Only now: who tunes a model of their own needs nothing of the embedded one.
        from sglang.srt.entrypoints.prepare import with_embedded_model

        return with_embedded_model(given)
    if given.speculative_algorithm is None and given.speculative_draft_model_path is None:
        raise ServerArgsError("--speculative-draft-model-path is needed: the folder of the model's drafter")
    return replace(given, speculative_algorithm=given.speculative_algorithm or EAGLE3)


def tune(flags: argparse.Namespace, given: ServerArgs) -> list[str]:
    """What is printed; the table is written on the way."""
    assert given.model_path is not None
    architecture = ModelConfig.from_folder(given.model_path, given.context_length).architecture
    shapes = [parse_shape(text) for text in flags.shapes]
    # All at once, so that a shape that can't be is said before anything is measured.
    args = [with_shape(given, shape).resolve(architecture) for shape in shapes]
    sampling = SamplingParams.from_dict(
        {
            "temperature": flags.temperature, "top_p": flags.top_p, "top_k": flags.top_k,
            "max_new_tokens": flags.output_len,
        }
    )  # fmt: skip
    tokenizer_path = args[0].tokenizer_path
    assert tokenizer_path is not None
    context_len = ModelConfig.from_folder(given.model_path, given.context_length).context_len
    prompts = prompt_ids(
        flags.prompts, TextTokenizer.from_folder(tokenizer_path), flags.num_prompts,
        context_len - flags.output_len,
    )  # fmt: skip
    most = given.max_running_requests or DEFAULT_RUNNING_REQUESTS
    sizes = sorted(set(flags.batch_sizes or [size for size in SIZES if size <= most]))
    if sizes[-1] > most:
        raise ServerArgsError(f"--batch-sizes {sizes[-1]} is more than --max-running-requests {most}")
    found = []
    for one in args:
        found.append(measure_shape(one, prompts, sampling, min(32, most), flags.cost_seconds))
        _record(flags, found[-1])
    kv_len = flags.context or sum(one.kv_len for one in found) / len(found)
    figures = [one.figures for one in found]
    if flags.save is not None:
        best = choose_best(figures, sizes, kv_len).figures
        kind = "sampled" if flags.temperature else "greedy"
        flags.save.write_text(_table(given, found[0].device, best, kind, len(prompts)).to_json())
    return report(figures, sizes, kv_len, None if flags.save is None else str(flags.save))


def _record(flags: argparse.Namespace, measured: Measured) -> None:
    figures = measured.figures
    print(f"{asdict(figures.shape)}: measured in {measured.seconds:.1f} s", file=sys.stderr)
    if flags.result_filename is None:
        return
    line = {
        "shape": asdict(figures.shape),
        "device": measured.device,
        "kv_len": measured.kv_len,
        "acceptance": list(figures.parts()),
        **figures.table.to_dict(),
    }
    with flags.result_filename.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _table(given: ServerArgs, device: str, best: ShapeFigures, kind: str, num_prompts: int) -> AutoTable:
    return AutoTable(
        device=device,
        model=Path(str(given.model_path)).name,
        drafter=Path(given.speculative_draft_model_path or str(given.speculative_algorithm)).name,
        shape=best.shape,
        table=best.table,
        acceptance={kind: best.parts()},
        note=f"{PROG}, acceptance of {num_prompts} prompts",
    )


def main(argv: Sequence[str] | None = None) -> int:
    logging.basicConfig(level=logging.WARNING)
    try:
        flags, given = parse(sys.argv[1:] if argv is None else argv)
        print("\n".join(tune(flags, given)))
    except USER_ERRORS as error:
        exit_with_error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())

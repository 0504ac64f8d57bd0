"""Measure the throughput of an Engine in this process: all prompts at once, no HTTP.

    python -m sglang.bench_offline_throughput --dataset-name humaneval --num-prompts 16

All other flags are those of sglang.launch_server; without --model-path it is the embedded model.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from sglang.benchmark.dataset_flags import DatasetFlags, check_dataset_flags, load_rows
from sglang.benchmark.prompt_row import DatasetError, PromptRow
from sglang.benchmark.refused_flags import refused_flags
from sglang.benchmark.report import line, title
from sglang.benchmark.tokenizer import load_tokenizer
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.entrypoints.prepare import StartError
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.flags import ServerArgsError, build_parser, exit_with_error, flag, refuse_empty

PROG: Final = "python -m sglang.bench_offline_throughput"
_RUN: Final = "run"
_WARMUP_PROMPTS: Final = 16
_WARMUP_TOKENS: Final = 16
_LABELS: Final = {
    "backend": "Backend",
    "successful_requests": "Successful requests",
    "total_latency": "Benchmark duration (s)",
    "total_input_tokens": "Total input tokens",
    "total_output_tokens": "Total generated tokens",
    "last_gen_throughput": "Last generation throughput (tok/s)",
    "request_throughput": "Request throughput (req/s)",
    "input_throughput": "Input token throughput (tok/s)",
    "output_throughput": "Output token throughput (tok/s)",
    "total_throughput": "Total token throughput (tok/s)",
}


@dataclass(frozen=True, slots=True)
class OfflineFlags(DatasetFlags):
    backend: str = flag("engine", str, _RUN, "engine: an Engine in this process")
    disable_ignore_eos: bool = flag(False, bool, _RUN, "answers may end before their length")
    extra_request_body: str | None = flag(None, str, _RUN, "a JSON object, merged into all sampling params")
    skip_warmup: bool = flag(False, bool, _RUN, "measure at once")
    result_filename: str | None = flag(None, str, _RUN, "JSONL; the record is appended to it")

    def extra_sampling(self) -> dict[str, Any]:
        try:
            found = json.loads(self.extra_request_body or "{}")
        except json.JSONDecodeError as error:
            raise ServerArgsError(f"--extra-request-body is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise ServerArgsError(f"--extra-request-body must be a JSON object, got {found!r}")
        return found


@dataclass(frozen=True, slots=True)
class OfflineFigures:
    """Upstream's record."""

    backend: str
    successful_requests: int
    total_latency: float
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    input_throughput: float
    output_throughput: float
    total_throughput: float
    last_gen_throughput: float

    @staticmethod
    def of(rows: Sequence[PromptRow], num_output: int, seconds: float, last_rate: float) -> OfflineFigures:
        num_input = sum(row.prompt_len for row in rows)
        return OfflineFigures(
            backend="engine",
            successful_requests=len(rows),
            total_latency=seconds,
            total_input_tokens=num_input,
            total_output_tokens=num_output,
            request_throughput=len(rows) / seconds,
            input_throughput=num_input / seconds,
            output_throughput=num_output / seconds,
            total_throughput=(num_input + num_output) / seconds,
            last_gen_throughput=last_rate,
        )


def parse(argv: Sequence[str]) -> tuple[OfflineFlags, ServerArgs]:
    """
    Raises:
        ServerArgsError: the flags can't be taken as they are.
    """
    refused = refused_flags()
    for word in argv:
        if (option := word.partition("=")[0]) in refused:
            raise ServerArgsError(refused[option])
    parser: argparse.ArgumentParser = build_parser(OfflineFlags, PROG, __doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parsed, rest = parser.parse_known_args(list(argv))
    values = vars(parsed)
    refuse_empty(OfflineFlags, values)
    flags = OfflineFlags(**{f.name: values[f.name] for f in fields(OfflineFlags)})
    if flags.backend != "engine":
        raise ServerArgsError(
            f"there is no backend {flags.backend} here: leave --backend out, or measure a server with"
            " python -m sglang.bench_serving"
        )
    check_dataset_flags(flags)
    flags.extra_sampling()
    return flags, ServerArgs.from_command_line(rest, PROG)


def measure(engine: Engine, rows: Sequence[PromptRow], flags: OfflineFlags) -> OfflineFigures:
    """All of them at once."""
    sampling = [
        {
            "temperature": 0,
            "max_new_tokens": row.output_len,
            "ignore_eos": not flags.disable_ignore_eos,
            **flags.extra_sampling(),
        }
        for row in rows
    ]
    texts = [row.prompt for row in rows if isinstance(row.prompt, str)]
    began = time.perf_counter()
    answers = engine.generate(texts, sampling)
    seconds = time.perf_counter() - began
    assert isinstance(answers, list)
    num_output = sum(answer["meta_info"]["completion_tokens"] for answer in answers)
    state = engine.get_server_info()["internal_states"][0]
    return OfflineFigures.of(rows, num_output, seconds, float(state.get("last_gen_throughput") or 0.0))


def _run(flags: OfflineFlags, args: ServerArgs) -> OfflineFigures:
    with Engine(server_args=args) as engine:
        info = engine.get_model_info()
        tokenizer = load_tokenizer(info.get("tokenizer_path") or info["model_path"])
        rows = load_rows(flags, tokenizer)
        if not flags.skip_warmup:
            short = [replace(r, output_len=min(r.output_len, _WARMUP_TOKENS)) for r in rows[:_WARMUP_PROMPTS]]
            measure(engine, short, flags)
            engine.flush_cache()  # else the first prompts would be known
        return measure(engine, rows, flags)


def main(argv: Sequence[str] | None = None) -> int:
    try:
        flags, args = parse(sys.argv[1:] if argv is None else argv)
        figures = _run(flags, args)
    except (ServerArgsError, DatasetError, StartError) as error:
        exit_with_error(str(error))
    except KeyboardInterrupt:
        exit_with_error("interrupted")
    record = asdict(figures)
    print("", title(" Offline Throughput Benchmark Result ", "="), sep="\n")
    print(*(line(label, record[name]) for name, label in _LABELS.items()), "=" * 50, sep="\n")
    if flags.result_filename:
        with Path(flags.result_filename).open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(record) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

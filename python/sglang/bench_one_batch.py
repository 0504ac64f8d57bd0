"""Time one static batch: hand-made plans for the executor, no scheduler, no server.

    python -m sglang.bench_one_batch --batch-size 1 4 --input-len 64 --output-len 32 --draft-len 3
    python -m sglang.bench_one_batch --correctness-test

Flags of ``sglang.launch_server`` choose the model; without ``--model-path`` it is the embedded one.
Every row runs to ``--output-len`` tokens. Step times are those of steps in which all rows run.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

from sglang.srt.utils.openmp import spin_briefly

spin_briefly()  # before the imports that bring torch

# ruff: noqa: E402
from sglang import bench_one_batch_profile as profiling
from sglang.bench_one_batch_cases import (
    DecodeTimes,
    FaultyStep,
    OneBatch,
    PrefillTime,
    Step,
    decode_times,
    places_needed,
)
from sglang.srt.configs.model_config import ModelConfig, ModelConfigError
from sglang.srt.managers.executor_build import ExecutorArgsError, build_executor
from sglang.srt.managers.executor_settings import executor_args
from sglang.srt.model_executor.executor import Executor
from sglang.srt.model_executor.memory import OutOfMemoryError
from sglang.srt.model_loader.weight_source import WeightError
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.flags import ServerArgsError, exit_with_error
from sglang.srt.utils.text_tokenizer import TextTokenizer, TokenizerError

PROG = "python -m sglang.bench_one_batch"
TEST_PROMPTS = (
    "The capital of France is",
    "The capital of the United Kindom is",
    "Today is a sunny day and I like",
)
USER_ERRORS = (
    ServerArgsError, ModelConfigError, ExecutorArgsError, OutOfMemoryError, WeightError, TokenizerError,
    FaultyStep,
)  # fmt: skip


class Bench:
    """An executor and the flags of this program; runs cases on it."""

    def __init__(self, executor: Executor, flags: argparse.Namespace, args: ServerArgs) -> None:
        self.executor = executor
        self.flags = flags
        self.draft_lens = [flags.draft_len, 0] if flags.alternate else [flags.draft_len]
        chunk = args.chunked_prefill_size or executor.info.default_chunk
        self.prefill_tokens = min(args.max_prefill_tokens, chunk) if chunk > 0 else args.max_prefill_tokens

    def run_case(self, prompts: Sequence[Sequence[int]], output_len: int) -> dict[str, Any]:
        """Prefill, then ``output_len`` tokens of each row; returns one JSONL record."""
        batch = self._batch(prompts, output_len)
        prefill = batch.prefill()
        steps: list[Step] = []

        def on_step(step: Step) -> None:
            steps.append(step)
            every = self.flags.log_decode_step
            if every and len(steps) % every == 0:
                print(
                    f"Decode {len(steps)}. draft_len: {step.draft_len}, device: {step.device_s:.5f} s,"
                    f" rows: {len(step.slots)}, tokens: {step.num_tokens}"
                )

        batch.decode_all(self.draft_lens, output_len, not self.flags.no_overlap, on_step=on_step)
        return self._record(prompts, output_len, prefill, steps)

    def trace_case(self, prompts: Sequence[Sequence[int]], output_len: int) -> list[Path]:
        """The same once more, under the profiler; returns the files."""
        case = f"batch{len(prompts)}_input{max(map(len, prompts))}_output{output_len}"
        batch = self._batch(prompts, output_len)
        return profiling.profile_batch(self.flags, batch, self.draft_lens, output_len, case)

    def check_room(self, prompts: Sequence[Sequence[int]], output_len: int) -> None:
        """
        Raises:
            ServerArgsError: the executor's KV cache or its context is too small for the case.
        """
        info, longest = self.executor.info, max(map(len, prompts))
        pages = len(prompts) * -(-places_needed(self.executor, longest, output_len) // info.page_size)
        what = f"batch {len(prompts)} of {longest} + {output_len} tokens needs"
        if pages > info.num_pages:
            places = [n * info.page_size for n in (pages, info.num_pages)]
            raise ServerArgsError(f"{what} {places[0]} KV places; there are {places[1]}")
        if longest + output_len > info.context_len:
            raise ServerArgsError(
                f"{what} a context of {longest + output_len} tokens; it is {info.context_len}"
            )

    def _batch(self, prompts: Sequence[Sequence[int]], output_len: int) -> OneBatch:
        places = places_needed(self.executor, max(map(len, prompts)), output_len)
        return OneBatch(self.executor, prompts, places, self.prefill_tokens)

    def _record(
        self, prompts: Sequence[Sequence[int]], output_len: int, prefill: PrefillTime, steps: list[Step]
    ) -> dict[str, Any]:
        times, num_rows, num_input = decode_times(steps), len(prompts), sum(map(len, prompts))
        decode_s = steps[-1].done_s - steps[0].launched_s if steps else 0.0
        total = prefill.wall_s + decode_s
        record = {
            "run_name": self.flags.run_name,
            "batch_size": num_rows,
            "input_len": max(map(len, prompts)),
            "output_len": output_len,
            "draft_len": self.flags.draft_len,
            "alternate": self.flags.alternate,
            "overlap": not self.flags.no_overlap,
            "simulate_acc_len": os.environ.get("SGLANG_SIMULATE_ACC_LEN"),
            "prefill_latency": prefill.wall_s,
            "prefill_device_s": prefill.device_s,
            "prefill_throughput": num_input / prefill.wall_s,
            "total_latency": total,
            "overall_throughput": (num_input + num_rows * output_len) / total,
        }
        return record | _decode_fields(times, num_rows)


def _decode_fields(times: DecodeTimes | None, num_rows: int) -> dict[str, Any]:
    """Upstream's two keys, and ours: of the steps in which every row ran."""
    if times is None:
        return {"median_decode_latency": 0.0, "median_decode_throughput": 0.0, "decode_steps": 0}
    return {
        "median_decode_latency": times.median_latency_s,
        "median_decode_throughput": num_rows * times.tokens_per_row / times.median_latency_s,
        "accept_length": times.tokens_per_row,
        "decode_steps": times.num_steps,
        "wall_step_s": times.wall_step_s,
        "median_device_step_s": times.median_device_s,
        "decode_throughput": times.tokens_per_s,
        "eager_steps": times.eager_steps,
        "modes": {f"spec(k={k})" if k else "plain": asdict(mode) for k, mode in times.modes.items()},
    }


def random_prompts(vocab_size: int, batch_size: int, input_len: int) -> list[list[int]]:
    """The same ids for a row whatever the batch's size is."""
    rng = random.Random(0)
    return [[rng.randrange(vocab_size) for _ in range(input_len)] for _ in range(batch_size)]


def correctness_test(bench: Bench, tokenizer_path: str) -> bool:
    """Greedy text of three prompts: cut prefill, then plain, speculative and alternating decoding."""
    executor, flags = bench.executor, bench.flags
    tokenizer = TextTokenizer.from_folder(tokenizer_path)
    prompts = [tokenizer.encode(text) for text in TEST_PROMPTS]
    output_len = flags.output_len[0]
    bench.check_room(prompts, output_len)
    spec = executor.info.spec
    most = flags.draft_len or (spec.num_steps if spec else 0)
    texts = []
    for lens in [[0]] + ([[most], [most, 0]] if most else []):
        batch = OneBatch(executor, prompts, places_needed(executor, max(map(len, prompts)), output_len))
        batch.prefill(min(flags.cut_len, min(map(len, prompts)) - 1))
        batch.decode_all(lens, output_len, not flags.no_overlap)
        texts.append([tokenizer.decode(o[:output_len], skip_special_tokens=False) for o in batch.outputs()])
    for prompt, text in zip(TEST_PROMPTS, texts[0], strict=True):
        print(f"{prompt}{text}\n")
    same = all(t == texts[0] for t in texts)
    print(f"{len(texts)} way(s) of decoding gave {'the same text' if same else f'different texts: {texts}'}")
    return same


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, ServerArgs]:
    parser = argparse.ArgumentParser(
        prog=PROG, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run-name", default="default")
    parser.add_argument("--batch-size", type=int, nargs="+", help="default: 1")
    parser.add_argument("--input-len", type=int, nargs="+", help="ids of the random prompts (default: 1024)")
    parser.add_argument("--output-len", type=int, nargs="+", default=[16], help="1: prefill alone")
    parser.add_argument(
        "--prompt-filename", type=Path, help="one prompt a line, a row each, instead of random ones"
    )
    parser.add_argument("--result-filename", default="result.jsonl", help="records are appended to it")
    parser.add_argument("--correctness-test", action="store_true")
    parser.add_argument("--cut-len", type=int, default=4, help="ids of the first prefill step of the test")
    parser.add_argument("--log-decode-step", type=int, default=0, help="print every so many steps; 0: none")
    parser.add_argument("--draft-len", type=int, default=0, help="draft forwards a step; 0: plain decoding")
    parser.add_argument("--alternate", action="store_true", help="every second step is plain")
    parser.add_argument("--no-overlap", action="store_true", help="wait for a step before launching the next")
    profiling.add_flags(parser)
    bench, rest = parser.parse_known_args(argv)
    if bench.prompt_filename and (bench.batch_size or bench.input_len):
        raise ServerArgsError("--prompt-filename sets the batch: leave out --batch-size and --input-len")
    bench.batch_size, bench.input_len = bench.batch_size or [1], bench.input_len or [1024]
    for name in ("batch_size", "input_len", "output_len"):
        if (least := min(getattr(bench, name))) < 1:
            raise ServerArgsError(f"--{name.replace('_', '-')} must be at least 1, got {least}")
    return bench, _model_args(bench, ServerArgs.from_command_line(rest, PROG))


def _model_args(bench: argparse.Namespace, given: ServerArgs) -> ServerArgs:
    if given.model_path is None:
        # Only now: a machine that benchmarks its own model needs nothing of the embedded one.
        from sglang.srt.entrypoints.prepare import with_embedded_model

        given = with_embedded_model(given)
    assert given.model_path is not None
    args = given.resolve(ModelConfig.from_folder(given.model_path, given.context_length).architecture)
    steps = args.speculative_num_steps or 0
    if bench.draft_len > steps:
        raise ServerArgsError(f"--draft-len {bench.draft_len} is more than --speculative-num-steps {steps}")
    rows = max(max(bench.batch_size), len(TEST_PROMPTS))
    if bench.prompt_filename:
        rows = max(rows, len(_prompt_lines(bench.prompt_filename)))
    sizes = args.cuda_graph_bs
    if args.device == "cuda" and not (sizes or args.cuda_graph_max_bs or args.disable_cuda_graph):
        sizes = tuple(sorted({*bench.batch_size, rows}))  # graphs for what is timed, and for the tail
    return replace(args, max_running_requests=rows, speculative_capture_max_bs=rows, cuda_graph_bs=sizes)


def _prompt_lines(file: Path) -> list[str]:
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise ServerArgsError(f"--prompt-filename {file} can't be read: {error.strerror}") from error
    if not lines:
        raise ServerArgsError(f"--prompt-filename {file} has no prompts")
    return lines


def _batches(bench: Bench, args: ServerArgs) -> list[list[list[int]]]:
    """The prompts of every case, but for the length of the output."""
    flags = bench.flags
    if flags.prompt_filename:
        assert args.tokenizer_path is not None
        tokenizer = TextTokenizer.from_folder(args.tokenizer_path)
        return [[tokenizer.encode(line) for line in _prompt_lines(flags.prompt_filename)]]
    vocab = bench.executor.info.vocab_size
    return [random_prompts(vocab, rows, size) for rows, size in product(flags.batch_size, flags.input_len)]


def _run(bench: Bench, args: ServerArgs) -> int:
    flags = bench.flags
    if flags.correctness_test:
        assert args.tokenizer_path is not None
        return 0 if correctness_test(bench, args.tokenizer_path) else 1
    cases = list(product(_batches(bench, args), flags.output_len))
    for prompts, output_len in cases:
        bench.check_room(prompts, output_len)
    bench.run_case(cases[0][0], min(8, cases[0][1]))  # warm up
    for prompts, output_len in cases:
        record = bench.run_case(prompts, output_len)
        print(json.dumps(record))
        if flags.result_filename:
            with Path(flags.result_filename).open("a") as file:
                file.write(json.dumps(record) + "\n")
        if flags.profile:
            print(*bench.trace_case(prompts, output_len), sep="\n")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    logging.basicConfig(level=logging.WARNING)
    try:
        flags, args = parse(sys.argv[1:] if argv is None else argv)
        executor = build_executor(executor_args(args))
    except USER_ERRORS as error:
        exit_with_error(str(error))
    try:
        return _run(Bench(executor, flags, args), args)
    except USER_ERRORS as error:
        exit_with_error(str(error))
    finally:
        executor.shutdown()


if __name__ == "__main__":
    sys.exit(main())

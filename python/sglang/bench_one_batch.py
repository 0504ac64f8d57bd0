"""Time one static batch: hand-made plans for the executor, no scheduler, no server.

    python -m sglang.bench_one_batch --batch-size 1 4 --input-len 64 --output-len 32 --draft-len 3
    python -m sglang.bench_one_batch --correctness-test

Flags of ``sglang.launch_server`` choose the model; without ``--model-path`` it is the embedded one.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

from sglang.srt.utils.openmp import spin_briefly

spin_briefly()  # before the imports that bring torch

# ruff: noqa: E402
from sglang.srt.configs.model_config import ModelConfig, ModelConfigError
from sglang.srt.managers.executor_build import ExecutorArgsError, build_executor
from sglang.srt.managers.executor_settings import executor_args
from sglang.srt.model_executor.executor import Executor
from sglang.srt.model_executor.memory import OutOfMemoryError
from sglang.srt.model_executor.step_plan import (
    PageWrite,
    PrefillChunk,
    SlotAdmission,
    SlotSampling,
    StepKind,
    StepPlan,
)
from sglang.srt.model_loader.weight_source import WeightError
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.flags import ServerArgsError, exit_with_error
from sglang.srt.utils.text_tokenizer import TextTokenizer

PROG = "python -m sglang.bench_one_batch"
TEST_PROMPTS = (
    "The capital of France is",
    "The capital of the United Kindom is",
    "Today is a sunny day and I like",
)
GREEDY = SlotSampling(temperature=0.0)
USER_ERRORS = (ServerArgsError, ModelConfigError, ExecutorArgsError, OutOfMemoryError, WeightError)


@dataclass
class Row:
    """One request: slot ``slot`` owns the pages that follow each other from ``first_page``."""

    slot: int
    prompt: list[int]
    output: list[int] = field(default_factory=list)


class OneBatch:
    """Rows in slots 1, 2, …, each with pages for all it will ever hold."""

    def __init__(self, executor: Executor, prompts: Sequence[list[int]], places: int) -> None:
        self._executor = executor
        self._rows = [Row(slot, list(prompt)) for slot, prompt in enumerate(prompts, start=1)]
        self._pages = -(-places // executor.info.page_size)
        self._step_id = 0

    def outputs(self) -> list[list[int]]:
        return [row.output for row in self._rows]

    def prefill(self, cut_len: int = 0) -> float:
        """Prompts in one step, or in two with the first ``cut_len`` ids alone. Returns seconds."""
        cuts = [(0, cut_len), (cut_len, None)] if cut_len else [(0, None)]
        return sum(self._prefill(start, end) for start, end in cuts)

    def decode(self, draft_len: int, output_len: int) -> tuple[float, int]:
        """One step of the rows that lack tokens; returns seconds and tokens put out."""
        rows = [row for row in self._rows if len(row.output) < output_len]
        slots = tuple(row.slot for row in rows)
        bounds = tuple(len(row.prompt) + len(row.output) - 1 for row in rows)
        plan = StepPlan(self._next_id(), StepKind.DECODE, slots, bounds, draft_len)
        return self._run(plan, rows)

    def _prefill(self, start: int, end: int | None) -> float:
        chunks = []
        for row in self._rows:
            ids = row.prompt[start:end]
            next_id = None if end is None or end >= len(row.prompt) else row.prompt[end]
            chunks.append(PrefillChunk(row.slot, start, tuple(ids), next_id))
        admissions, writes = [], []
        if start == 0:
            admissions = [SlotAdmission(row.slot, len(row.prompt), 0, GREEDY) for row in self._rows]
            writes = [PageWrite(row.slot, 0, self._pages_of(row)) for row in self._rows]
        plan = StepPlan(
            self._next_id(),
            StepKind.PREFILL,
            prefill=tuple(chunks),
            admissions=tuple(admissions),
            page_writes=tuple(writes),
        )
        return self._run(plan, self._rows)[0]

    def _pages_of(self, row: Row) -> tuple[int, ...]:
        first = 1 + (row.slot - 1) * self._pages
        return tuple(range(first, first + self._pages))

    def _run(self, plan: StepPlan, rows: Sequence[Row]) -> tuple[float, int]:
        began = time.perf_counter()
        result = self._executor.launch(plan).wait()
        seconds = time.perf_counter() - began
        for row, tokens in zip(rows, result.tokens, strict=True):
            row.output += tokens
        return seconds, sum(len(tokens) for tokens in result.tokens)

    def _next_id(self) -> int:
        self._step_id += 1
        return self._step_id


def places_needed(executor: Executor, input_len: int, output_len: int) -> int:
    """A row may be stepped once more than its last token needs, with all its drafts."""
    spec = executor.info.spec
    return input_len + output_len + (spec.num_steps + spec.num_draft_tokens + 1 if spec else 1)


def run_case(
    executor: Executor, bench: argparse.Namespace, batch_size: int, input_len: int, output_len: int
) -> dict[str, object]:
    """Prefill random prompts, then decode ``output_len`` tokens of each; returns one JSONL record."""
    rng = random.Random(0)
    vocab = executor.info.vocab_size
    prompts = [[rng.randrange(vocab) for _ in range(input_len)] for _ in range(batch_size)]
    batch = OneBatch(executor, prompts, places_needed(executor, input_len, output_len))
    prefill = batch.prefill()
    latencies: list[float] = []
    emitted = row_steps = 0
    while (running := sum(len(o) < output_len for o in batch.outputs())) > 0:
        draft_len = 0 if bench.alternate and len(latencies) % 2 else bench.draft_len
        seconds, tokens = batch.decode(draft_len, output_len)
        latencies.append(seconds)
        emitted, row_steps = emitted + tokens, row_steps + running
        if bench.log_decode_step and len(latencies) % bench.log_decode_step == 0:
            print(
                f"Decode {len(latencies)}. draft_len: {draft_len}, latency: {seconds:.5f} s, tokens: {tokens}"
            )
    median = statistics.median(latencies) if latencies else 0.0
    accept = emitted / row_steps if row_steps else 0.0
    total = prefill + sum(latencies)
    return {
        "run_name": bench.run_name,
        "batch_size": batch_size,
        "input_len": input_len,
        "output_len": output_len,
        "draft_len": bench.draft_len,
        "alternate": bench.alternate,
        "prefill_latency": prefill,
        "prefill_throughput": batch_size * input_len / prefill,
        "median_decode_latency": median,
        "median_decode_throughput": batch_size * accept / median if median else 0.0,
        "accept_length": accept,
        "total_latency": total,
        "overall_throughput": batch_size * (input_len + output_len) / total,
    }


def correctness_test(executor: Executor, bench: argparse.Namespace, tokenizer_path: str) -> bool:
    """Greedy text of three prompts: cut prefill, then plain, speculative and alternating decoding."""
    tokenizer = TextTokenizer.from_folder(tokenizer_path)
    prompts = [tokenizer.encode(text) for text in TEST_PROMPTS]
    output_len = bench.output_len[0]
    places = places_needed(executor, max(map(len, prompts)), output_len)
    spec = executor.info.spec
    most = bench.draft_len or (spec.num_steps if spec else 0)
    texts = []
    for lens in [[0]] + ([[most], [most, 0]] if most else []):
        batch = OneBatch(executor, prompts, places)
        batch.prefill(min(bench.cut_len, min(map(len, prompts)) - 1))
        step = 0
        while any(len(o) < output_len for o in batch.outputs()):
            batch.decode(lens[step % len(lens)], output_len)
            step += 1
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
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1])
    parser.add_argument("--input-len", type=int, nargs="+", default=[1024])
    parser.add_argument("--output-len", type=int, nargs="+", default=[16])
    parser.add_argument("--result-filename", default="result.jsonl", help="records are appended to it")
    parser.add_argument("--correctness-test", action="store_true")
    parser.add_argument("--cut-len", type=int, default=4, help="ids of the first prefill step of the test")
    parser.add_argument("--log-decode-step", type=int, default=0, help="print every so many steps; 0: none")
    parser.add_argument("--draft-len", type=int, default=0, help="draft forwards a step; 0: plain decoding")
    parser.add_argument("--alternate", action="store_true", help="every second step is plain")
    bench, rest = parser.parse_known_args(argv)
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
    return replace(args, max_running_requests=rows, speculative_capture_max_bs=rows)


def main(argv: Sequence[str] | None = None) -> int:
    logging.basicConfig(level=logging.WARNING)
    try:
        bench, args = parse(sys.argv[1:] if argv is None else argv)
        executor = build_executor(executor_args(args))
    except USER_ERRORS as error:
        exit_with_error(str(error))
    if bench.correctness_test:
        assert args.tokenizer_path is not None
        return 0 if correctness_test(executor, bench, args.tokenizer_path) else 1
    cases = list(product(bench.batch_size, bench.input_len, bench.output_len))
    for batch, input_len, output_len in cases:
        need = batch * places_needed(executor, input_len, output_len)
        if need > executor.info.num_pages * executor.info.page_size:
            exit_with_error(f"batch {batch} of {input_len} + {output_len} tokens needs {need} KV places")
    run_case(executor, bench, cases[0][0], cases[0][1], min(8, cases[0][2]))  # warm up
    for case in cases:
        record = run_case(executor, bench, *case)
        print(json.dumps(record))
        if bench.result_filename:
            with Path(bench.result_filename).open("a") as file:
                file.write(json.dumps(record) + "\n")
    executor.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What a grammar costs a decode step: requests with one and requests without one in turn, in one process.

    python benchmark/structured_output/step_cost.py

The embedded model and its drafter on this machine's CPU, under the real scheduler, without HTTP. A round
runs the same prompts free and with a JSON schema, in random order, and takes the median of its decode steps'
times; a ratio is the median over rounds. A step with a grammar can't overlap with the host's work, and its
masks have to be made.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path

from sglang.srt.utils.openmp import spin_briefly

spin_briefly()  # before the imports that bring torch

# ruff: noqa: E402
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from sglang.embedded.model import embedded_drafter_path, embedded_model_path
from sglang.srt.configs.executor_args import ExecutorArgs
from sglang.srt.constrained.backends import backend_maker
from sglang.srt.constrained.compiling import GrammarCompiler
from sglang.srt.constrained.grammar import JsonOptions
from sglang.srt.managers.executor_build import build_executor
from sglang.srt.managers.io_struct import GenerateRequest, SetStateRequest
from sglang.srt.managers.metrics import NullSink
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_config import SchedulerConfig
from sglang.srt.mem_cache.prefix_cache import NoCache
from sglang.srt.model_executor.in_process_executor import InProcessExecutor
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.toggle import decide_by_threshold
from sglang.srt.utils.text_tokenizer import TextTokenizer

SCHEMA = '{"type": "object", "properties": {"story": {"type": "string"}}, "required": ["story"]}'
PROMPT = "Write a story about number {number} as JSON."
NUM_TOKENS = 48
EOS = (2,)  # the embedded model's
MODES = {"plain": 0, "speculative": None}  # thresholds


def make_scheduler(executor: InProcessExecutor, tokenizer: TextTokenizer, backend: str) -> Scheduler:
    make = backend_maker(backend, tokenizer, executor.info.vocab_size, EOS, JsonOptions())
    grammars = GrammarCompiler(make)
    grammars.preload()
    return Scheduler(
        executor=executor,
        config=SchedulerConfig(max_running_requests=64),
        policy=decide_by_threshold,
        cache=NoCache(),
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
        eos_ids=EOS,
        emit=lambda batch: None,
        reply=lambda reply: None,
        metrics=NullSink(),
        clock=time.time,
        grammars=grammars,
    )


def step_seconds(scheduler: Scheduler, tokenizer: TextTokenizer, rows: int, schema: str | None) -> float:
    """Median of the decode steps of ``rows`` requests."""
    params = SamplingParams(
        temperature=0.0, max_new_tokens=NUM_TOKENS, ignore_eos=True, sampling_seed=1, json_schema=schema
    )
    for number in range(rows):
        ids = tokenizer.encode(PROMPT.format(number=number))
        scheduler.receive(GenerateRequest(f"r{number}", ids, params, False, received_ts=0.0))
    seconds = []
    while scheduler.has_work:
        began = time.perf_counter()
        scheduler.step()
        if len(scheduler.table.decoding) == rows and not scheduler.table.prefilling:
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[3:])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--backends", nargs="+", default=["xgrammar", "llguidance"])
    args = parser.parse_args()
    model = embedded_model_path()
    tokenizer = TextTokenizer.from_folder(model)
    executor = build_executor(
        ExecutorArgs(
            str(model), str(embedded_drafter_path()), max_running_requests=64, max_total_tokens=20_000
        )
    )
    rng = random.Random(1)
    print("| backend | rows | mode | step without, ms | step with, ms | ratio |\n|-|-|-|-|-|-|")
    for backend in args.backends:
        scheduler = make_scheduler(executor, tokenizer, backend)
        for rows in args.rows:
            for mode, threshold in MODES.items():
                change = {"speculative_disable_bs_threshold": threshold}
                scheduler.receive(SetStateRequest("mode", change))
                rounds = []
                for _ in range(args.rounds + 1):
                    order = [None, SCHEMA]
                    rng.shuffle(order)
                    rounds.append({s: step_seconds(scheduler, tokenizer, rows, s) for s in order})
                free, formed = (1000 * statistics.median(r[s] for r in rounds[1:]) for s in (None, SCHEMA))
                ratio = statistics.median(r[SCHEMA] / r[None] for r in rounds[1:])
                print(
                    f"| {backend} | {rows} | {mode} | {free:.1f} | {formed:.1f} | {ratio:.2f} |", flush=True
                )
    executor.shutdown()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

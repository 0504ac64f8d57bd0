"""Plain, speculative and toggled steps of the embedded model in turn, step by step, in one process.

    python benchmark/cpu_step/mode_steps.py --threshold 64

``make bench-toggle`` drives whole servers for seconds at a time, and on a shared machine the same server
differs by 10 % between one second and the next. Here the modes take turns every step, in shuffled order, on
the same rows, so they meet the same machine. A mode's rate is the mean tokens of a step with so many drafts
(of all modes that made such steps: what is accepted is luck) over the mode's own time; ratios are medians
over rounds of a few steps, with a 95 % bootstrap interval. Scheduler and HTTP have no part in it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sglang.srt.utils.openmp import spin_briefly

spin_briefly()  # before the imports that bring torch

# ruff: noqa: E402
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.spec_toggle.prompts import interleaved, read_prompts, stretch
from sglang.bench_one_batch_cases import OneBatch
from sglang.embedded.model import EMBEDDED_DISABLE_BS_THRESHOLD, embedded_drafter_path, embedded_model_path
from sglang.srt.configs.executor_args import ExecutorArgs
from sglang.srt.managers.executor_build import build_executor
from sglang.srt.model_executor.executor import Executor
from sglang.srt.speculative.toggle import ToggleInput, decide_by_threshold
from sglang.srt.utils.text_tokenizer import TextTokenizer

NUM_STEPS = 3
STREAMS = (1, 2, 4, 8, 16, 32, 64)
MAX_PROMPT = 200  # ids
NO_LIMIT = 10**9
DRAWS = 2000


@dataclass
class Round:
    """Tokens and seconds of each mode."""

    tokens: dict[str, int] = field(default_factory=lambda: {"plain": 0, "spec": 0, "toggle": 0})
    seconds: dict[str, float] = field(default_factory=lambda: {"plain": 0.0, "spec": 0.0, "toggle": 0.0})

    def ratio(self, mode: str, other: str, tokens: dict[str, float]) -> float:
        """Of two modes' rates; tokens: of a step of each."""
        return tokens[mode] / self.seconds[mode] / (tokens[other] / self.seconds[other])


def draft_lens(rows: int, threshold: int, executor: Executor) -> dict[str, int]:
    state = ToggleInput(rows, threshold, executor.info.max_spec_rows, NUM_STEPS, 0, spec_fits=True)
    return {"plain": 0, "spec": NUM_STEPS, "toggle": decide_by_threshold(state).draft_len}


def measure(
    executor: Executor, prompts: Sequence[Sequence[int]], lens: dict[str, int], rounds: int, steps: int
) -> list[Round]:
    """The first round warms up and is left out."""
    places = MAX_PROMPT + (rounds + 1) * steps * (2 * NUM_STEPS + 3) + 16
    batch = OneBatch(executor, prompts, places)
    batch.prefill()
    order, rng, found = list(lens), random.Random(0), []
    for _ in range(rounds + 1):
        found.append(Round())
        for _ in range(steps):
            rng.shuffle(order)
            for mode in order:
                seconds, tokens = batch.decode(lens[mode], NO_LIMIT)
                found[-1].seconds[mode] += seconds
                found[-1].tokens[mode] += tokens
    return found[1:]


def median_with_interval(values: Sequence[float]) -> tuple[float, float, float]:
    rng = random.Random(0)
    draws = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(DRAWS))
    return statistics.median(values), draws[DRAWS // 40], draws[-DRAWS // 40]


def tokens_a_step(lens: dict[str, int], rounds: Sequence[Round], steps: int) -> dict[str, float]:
    """Mean tokens of a mode's step, over every mode with as many drafts."""
    found = {}
    for mode, draft_len in lens.items():
        alike = [other for other in lens if lens[other] == draft_len]
        found[mode] = sum(r.tokens[m] for r in rounds for m in alike) / (len(rounds) * steps * len(alike))
    return found


def line(rows: int, lens: dict[str, int], rounds: Sequence[Round], steps: int) -> str:
    tokens = tokens_a_step(lens, rounds, steps)
    rates = {mode: statistics.median(tokens[mode] * steps / r.seconds[mode] for r in rounds) for mode in lens}
    better = max("plain", "spec", key=lambda mode: rates[mode])
    gain = median_with_interval([r.ratio("spec", "plain", tokens) for r in rounds])
    held = median_with_interval([r.ratio("toggle", better, tokens) for r in rounds])
    mode = "spec" if lens["toggle"] else "plain"
    ratios = " | ".join(f"{m:.2f} [{low:.2f}, {high:.2f}]" for m, low, high in (gain, held))
    return (
        f"| {rows} | {rates['plain']:.1f} | {rates['spec']:.1f} | {rates['toggle']:.1f} ({mode}) "
        f"| {ratios} | {better} | {tokens['spec'] / rows:.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threshold", type=int, default=EMBEDDED_DISABLE_BS_THRESHOLD)
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=2, help="of each mode in a round")
    parser.add_argument("--out", type=Path, help="append each round as a JSON line")
    args = parser.parse_args()
    most = max(args.streams)
    places = MAX_PROMPT + (args.rounds + 1) * args.steps * (2 * NUM_STEPS + 3) + 16
    executor = build_executor(
        ExecutorArgs(
            embedded_model_path(),
            embedded_drafter_path(),
            max_total_tokens=most * places,
            max_running_requests=most,
        )
    )
    tokenizer = TextTokenizer.from_folder(embedded_model_path())
    texts = stretch(interleaved(read_prompts()), 0, 4 * most)
    ids = [tokenizer.encode(prompt.text, add_special_tokens=False) for prompt in texts]
    short = [prompt for prompt in ids if len(prompt) <= MAX_PROMPT]
    print("| rows | plain tok/s | spec | toggle | spec / plain | toggle / better | better | accept length |")
    print("|-|-|-|-|-|-|-|-|")
    for rows in args.streams:
        lens = draft_lens(rows, args.threshold, executor)
        rounds = measure(executor, short[:rows], lens, args.rounds, args.steps)
        print(line(rows, lens, rounds, args.steps), flush=True)
        if args.out is not None:
            with args.out.open("a") as file:
                for r in rounds:
                    file.write(json.dumps({"rows": rows, "tokens": r.tokens, "seconds": r.seconds}) + "\n")
    executor.shutdown()


if __name__ == "__main__":
    main()

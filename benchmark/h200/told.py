"""Are log-probabilities and hidden states that rows tell right on the GPU, and what do they cost?

    python benchmark/h200/told.py --out told.jsonl
    python benchmark/h200/told.py --device cpu --tiny       # does it run?

Small random models in bfloat16, through an executor as a server builds it:

told  texts of plain, speculative and alternating steps, with graphs and without. Each logprob of an answer
      and of a prompt is beside the CPU's in float32; it fails where one is off by more than four times what
      bfloat16 changes on the CPU at most. (A graph whose logits another one had written over would be off by
      whole numbers.) Hidden states are beside those that a prefill of the text tells.
cost  milliseconds of a decode step, by how many likeliest ids its rows tell (-1: they tell nothing).

The exit code is 1 if a part fails.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "test"))

import torch
from helpers.plan_driver import DrivenRequest, PlanDriver

from benchmark.h200.dense_models import CASES
from benchmark.h200.executors import Records, add_common_flags, device_name
from benchmark.h200.latent_models import CASES as LATENT_CASES
from benchmark.h200.reference_ids import TeacherForced
from benchmark.h200.small_correctness import ROWS, Setting, setting_of
from sglang.bench_one_batch import random_prompts
from sglang.srt.model_executor.in_process_executor import InProcessExecutor
from sglang.srt.model_executor.step_plan import RowReport, RowWish, StepPlan

NAMES: Final = ("qwen3-eagle3-chain", "qwen3-eagle3-tree", "kimi-eagle3-mla-tree")
TOP: Final = 5
ROUNDING: Final = 4  # times what bfloat16 changes on the CPU
CLOSE: Final = 0.1  # of hidden states' spread


@dataclass
class Told:
    """Of one text: logprobs of its ids but the first, hidden states of its ids but the last."""

    logprobs: list[float] = field(default_factory=list)
    hidden: list[float] = field(default_factory=list)
    hidden_size: int = 1

    def add(self, report: RowReport) -> None:
        for part in (report.prompt, report.chosen):
            self.logprobs += part.own
            best = all(top[0] >= own - 1e-6 for own, top in zip(part.own, part.top, strict=True))
            assert best, "an id is likelier than the likeliest"
        vectors = report.hidden
        self.hidden += array("d" if vectors.kind == "d" else "f", vectors.data)
        self.hidden_size = vectors.size or self.hidden_size

    def states(self) -> torch.Tensor:
        """[ids - 1, H]"""
        return torch.tensor(self.hidden).view(-1, self.hidden_size)


def wishes(plan: StepPlan, num_top: int) -> tuple[RowWish, ...]:
    decoding = [RowWish(row, True, num_top=num_top, hidden_from=0) for row in range(len(plan.decode_slots))]
    chunks = [
        RowWish(row, chunk.is_last, 0, len(chunk.token_ids) - chunk.is_last, num_top, hidden_from=0)
        for row, chunk in enumerate(plan.prefill, start=len(decoding))
    ]
    return (*decoding, *chunks)


def run_wishing(
    driver: PlanDriver, plan: StepPlan, rows: Sequence[DrivenRequest], told: dict[int, Told]
) -> None:
    result = driver.run(replace(plan, wishes=wishes(plan, TOP)), rows)
    for report in result.reports:
        told[rows[report.row].slot].add(report)


def tell(
    executor: InProcessExecutor, prompts: Sequence[list[int]], output_len: int, draft_lens: Sequence[int]
) -> list[tuple[list[int], Told]]:
    """Texts and what was told of them. ``draft_lens``: of the steps, in turn."""
    driver = PlanDriver(executor, poison=False)
    requests = [DrivenRequest(driver.free_slots.pop(), prompt) for prompt in prompts]
    told = {request.slot: Told() for request in requests}
    for request in requests:
        for plan in driver.prefill_plans(request, chunk=16):
            run_wishing(driver, plan, [request], told)
    step = 0
    while running := [r for r in requests if len(r.output) < output_len]:
        draft_len = draft_lens[step % len(draft_lens)]
        run_wishing(driver, driver.plan(decode=running, draft_len=draft_len), running, told)
        step += 1
    return [(request.known, told[request.slot]) for request in requests]


def check_told(setting: Setting) -> bool:
    lengths, steps, right = setting.lengths, setting.case.shape[0], True
    prompts = [[3 + token % 240 for token in ids] for ids in random_prompts(250, ROWS, lengths.prompt)]
    modes = {"plain": [0], "spec": [steps], "alternate": [steps, 0]}
    longest = lengths.prompt + lengths.output + steps + 1
    exact, rounded = (
        TeacherForced(setting.target, dtype, longest) for dtype in (torch.float32, torch.bfloat16)
    )
    for graphs in (True, False) if setting.wanted.device == "cuda" else (True,):
        with setting.executor(graphs=graphs) as executor:
            for mode, draft_lens in modes.items():
                texts = tell(executor, prompts, lengths.output, draft_lens)
                worst = bound = distance = 0.0
                for ids, told in texts:
                    of_cpu, of_bf16 = (_logprobs(model, ids) for model in (exact, rounded))
                    bound = max(bound, float((of_cpu - of_bf16).abs().max()))
                    worst = max(worst, float((of_cpu - torch.tensor(told.logprobs)).abs().max()))
                    [(_, whole)] = tell(executor, [ids], 1, [0])
                    states = whole.states()[: len(ids) - 1]
                    distance = max(distance, float((states - told.states()).std() / states.std()))
                right &= setting.add(
                    "told", worst <= max(ROUNDING * bound, 1e-3) and distance <= CLOSE, graphs=graphs,
                    mode=mode, places=sum(len(told.logprobs) for _, told in texts), worst=worst,
                    cpu_bf16=bound, hidden=distance,
                )  # fmt: skip
    return right


def _logprobs(model: TeacherForced, ids: list[int]) -> torch.Tensor:
    """[ids - 1]"""
    logits = model.logits(ids, len(ids) - 1)
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def time_steps(setting: Setting, repeats: int) -> bool:
    prompts = [
        [3 + token % 240 for token in ids] for ids in random_prompts(250, ROWS, setting.lengths.prompt)
    ]
    with setting.executor() as executor:
        driver = PlanDriver(executor, poison=False)
        requests = [driver.add(prompt) for prompt in prompts]
        for draft_len in (0, setting.case.shape[0]):
            for num_top in (-1, 0, 20):
                taken = []
                for _ in range(repeats):
                    plan = driver.plan(decode=requests, draft_len=draft_len)
                    told = (
                        () if num_top < 0 else tuple(RowWish(r, True, num_top=num_top) for r in range(ROWS))
                    )
                    taken.append(driver.run(replace(plan, wishes=told), requests).device_time_s * 1e3)
                setting.out.add(
                    "cost", case=setting.case.name, draft_len=draft_len, num_top=num_top, rows=ROWS,
                    milliseconds=median(taken),
                )  # fmt: skip
    return True


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_flags(parser)
    parser.add_argument(
        "--cases", nargs="+", choices=[case.name for case in (*CASES, *LATENT_CASES)], default=NAMES
    )
    args = parser.parse_args(argv)
    out, failed = Records(args.out, device_name(args.device)), []
    with tempfile.TemporaryDirectory() as root:
        for case in (*CASES, *LATENT_CASES):
            if case.name not in args.cases:
                continue
            setting = setting_of(case, Path(root), args, out)
            if not check_told(setting):
                failed.append(case.name)
            time_steps(setting, 1 if args.tiny else 8)
    print(f"failed: {', '.join(failed)}" if failed else "all of it is right")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""From a step's output on the device to the result that the scheduler reads."""

from __future__ import annotations

import torch

from sglang.srt.model_executor.step import StepOutput
from sglang.srt.model_executor.step_plan import StepPlan, StepResult


def pack(output: StepOutput) -> torch.Tensor:
    """[R, C + 2] int64: tokens, count, valid ones; so that one copy brings everything to the host."""
    return torch.cat([output.tokens, output.counts[:, None], output.num_valid[:, None]], dim=1)


def unpack(plan: StepPlan, packed_cpu: torch.Tensor | None, device_time_s: float) -> StepResult:
    """The result of a plan. Chunks before a prompt's last one put out nothing."""
    rows = [] if packed_cpu is None else packed_cpu.tolist()
    num_decode = len(plan.decode_slots)
    chooses = [True] * num_decode + [chunk.is_last for chunk in plan.prefill]
    return StepResult(
        step_id=plan.step_id,
        tokens=tuple(tuple(row[: row[-1]]) if c else () for row, c in zip(rows, chooses, strict=False)),
        faults=tuple(row[-1] < row[-2] for row in rows),
        device_time_s=device_time_s,
    )

"""What a decode step's time is made of: verification of query tokens, draft forwards, and KV tokens read.

    seconds = verify(query tokens of all rows) + forwards * draft(rows) + per_kv_token_s * KV tokens

Plain steps give ``verify`` up to their largest size, speculative ones of the longest draft give ``draft`` and
the rest of ``verify``. So steps that were not measured (other draft lengths, ragged ones) can be estimated.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from sglang.srt.model_executor.step_plan import StepCost

Points = tuple[tuple[float, float], ...]  # (x, seconds), ascending


class StructureError(ValueError):
    """Costs that do not say what a step is made of."""


@dataclass(frozen=True, slots=True)
class StepStructure:
    verify: Points  # by query tokens
    draft: Points  # by rows; one draft forward
    per_kv_token_s: float

    def seconds(self, rows: int, query_tokens: float, num_forwards: int, kv_tokens: float) -> float:
        fixed = line(self.verify, query_tokens) + num_forwards * line(self.draft, rows)
        return fixed + self.per_kv_token_s * kv_tokens

    def cost(self, draft_len: int, rows: int) -> StepCost:
        fixed = self.seconds(rows, rows * (draft_len + 1), draft_len, 0.0)
        return StepCost(draft_len, rows, fixed, self.per_kv_token_s)


def line(points: Points, x: float) -> float:
    """The value at ``x`` on straight lines between points, and on beyond the last two."""
    if len(points) == 1 or x <= points[0][0]:
        return points[0][1]
    index = min(max(1, bisect_left(points, (x,))), len(points) - 1)
    (x0, y0), (x1, y1) = points[index - 1], points[index]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def structure_of(costs: Sequence[StepCost]) -> StepStructure:
    """From plain steps and those of the longest draft.

    Raises:
        StructureError: either is missing, or no size has its verification among the plain ones.
    """
    longest = max((cost.draft_len for cost in costs), default=0)
    plain = sorted((c for c in costs if c.draft_len == 0), key=lambda c: c.rows)
    drafted = sorted((c for c in costs if c.draft_len == longest), key=lambda c: c.rows)
    if not plain or longest == 0:
        raise StructureError("costs of plain steps and of speculative ones are needed")
    verify: Points = tuple((float(c.rows), c.fixed_s) for c in plain)
    within = [c for c in drafted if c.rows * (longest + 1) <= plain[-1].rows]
    if not within:
        raise StructureError(f"plain steps of {drafted[0].rows * (longest + 1)} rows or more are needed")
    draft: Points = tuple(
        (float(c.rows), max(0.0, (c.fixed_s - line(verify, c.rows * (longest + 1))) / longest))
        for c in within
    )
    beyond: Points = tuple(
        (float(c.rows * (longest + 1)), c.fixed_s - longest * line(draft, c.rows))
        for c in drafted
        if c not in within
    )
    per_token = sum(c.per_kv_token_s for c in plain) / len(plain)
    return StepStructure(verify + beyond, draft, per_token)

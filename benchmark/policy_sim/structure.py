"""What a decode step's time is made of: verification of query tokens, draft forwards, and KV tokens read.

    seconds = verify(query tokens of all rows) + forwards * draft(rows) + per_kv_token_s * KV tokens

Steps of different draft lengths with the same number of query tokens tell the two apart. So steps that were
not measured (ragged ones) can be estimated.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from sglang.srt.model_executor.graph_sizes import ragged_keys
from sglang.srt.model_executor.step_plan import StepCost
from sglang.srt.speculative.cost_table import CostTable

Points = tuple[tuple[float, float], ...]  # (x, seconds), ascending


class StructureError(ValueError):
    """Costs that do not say what a step is made of."""


@dataclass(frozen=True, slots=True)
class StepStructure:
    verify: Points  # by query tokens
    draft: Points  # by rows; one draft forward
    per_kv_token_s: float

    def fixed_s(self, draft_len: int, rows: int) -> float:
        """Of a step, without the KV tokens it reads."""
        return line(self.verify, rows * (draft_len + 1)) + draft_len * line(self.draft, rows)


def line(points: Points, x: float) -> float:
    """The value at ``x`` on straight lines between points, and on beyond the last two."""
    if len(points) == 1 or x <= points[0][0]:
        return points[0][1]
    index = min(max(1, bisect_left(points, (x,))), len(points) - 1)
    (x0, y0), (x1, y1) = points[index - 1], points[index]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def timed(costs: Sequence[StepCost]) -> list[StepCost]:
    """Without those on the straight line between their neighbours, which were not measured."""
    by_length: dict[int, list[StepCost]] = defaultdict(list)
    for cost in costs:
        by_length[cost.draft_len].append(cost)
    kept = []
    for of_length in by_length.values():
        of_length.sort(key=lambda cost: cost.rows)
        for index, cost in enumerate(of_length):
            around = of_length[max(0, index - 1) : index + 2 : 2]
            points = tuple((float(c.rows), c.fixed_s) for c in around)
            if len(around) < 2 or abs(line(points, cost.rows) / cost.fixed_s - 1.0) > 1e-9:
                kept.append(cost)
    return kept


def structure_of(costs: Sequence[StepCost]) -> StepStructure:
    """By least squares: a value for each number of query tokens, a line for draft forwards.

    Raises:
        StructureError: nothing tells verification and draft forwards apart.
    """
    told = timed(costs)
    if not {0} < {cost.draft_len for cost in told}:
        raise StructureError("costs of plain steps and of speculative ones are needed")
    tokens = sorted({_query_tokens(cost) for cost in told})
    if len(tokens) == len(told):
        raise StructureError("steps of two draft lengths with the same number of query tokens are needed")
    parts = np.zeros((len(told), len(tokens) + 2))  # [costs, query tokens + (draft forward, its part by row)]
    for row, cost in zip(parts, told, strict=True):
        row[tokens.index(_query_tokens(cost))] = 1.0
        row[-2:] = cost.draft_len, cost.draft_len * cost.rows
    parts /= np.array([cost.fixed_s for cost in told])[:, None]
    found = np.linalg.lstsq(parts, np.ones(len(told)), rcond=None)[0]
    if found[-1] < 0.0:  # more rows are never cheaper
        found = np.append(np.linalg.lstsq(parts[:, :-1], np.ones(len(told)), rcond=None)[0], 0.0)
    ends = (1.0, float(max(cost.rows for cost in told)))
    return StepStructure(
        verify=tuple(zip(map(float, tokens), map(float, found[:-2]), strict=True)),
        draft=tuple((rows, max(0.0, float(found[-2] + found[-1] * rows))) for rows in ends),
        per_kv_token_s=median(cost.per_kv_token_s for cost in told),
    )


def with_ragged(table: CostTable) -> CostTable:
    """With costs of steps whose rows have draft lengths of their own, of the sizes that a server captures.

    They were not measured: each is the table's cost of a step with all drafts, less what its fewer query
    tokens save of one by the structure.
    """
    structure, costs = structure_of(table.costs), {(cost.draft_len, cost.rows): cost for cost in table.costs}
    sizes = {k: [cost.rows for cost in table.costs if cost.draft_len == k] for k in table.draft_lens}
    ragged = []
    for key in ragged_keys(sizes):
        forwards = key.draft_len * line(structure.draft, key.rows)
        part = (line(structure.verify, key.tokens) + forwards) / structure.fixed_s(key.draft_len, key.rows)
        common = costs[key.draft_len, key.rows]
        ragged.append(replace(common, fixed_s=common.fixed_s * part, tokens=key.tokens))
    return CostTable.from_costs([*table.costs, *ragged], table.padded)


def _query_tokens(cost: StepCost) -> int:
    return cost.rows * (cost.draft_len + 1)

"""What a decode step costs, by draft length, rows and KV tokens: a table of measurements and how to read it.

Pure: no torch, no clock, no files. Between two measured sizes a table is read as the device runs: CUDA
graphs pad to the next size, eager steps grow with the rows.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from sglang.srt.model_executor.step_plan import RaggedSize, StepCost

_TOKENS: Final = "tokens"


class CostTableError(ValueError):
    """A table that can't be used; the message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class CostCurve:
    """The measured sizes of one draft length, ascending."""

    draft_len: int
    rows: tuple[int, ...]
    fixed_s: tuple[float, ...]
    per_kv_token_s: tuple[float, ...]
    padded: bool

    def cell(self, rows: int) -> int:
        """Index of the size that a step of ``rows`` counts as: the next one up, at most the last."""
        return min(bisect_left(self.rows, rows), len(self.rows) - 1)

    def seconds(self, rows: int, kv_tokens: float) -> float:
        index = bisect_left(self.rows, rows)
        if index == len(self.rows):
            return self._beyond(rows) + self.per_kv_token_s[-1] * kv_tokens
        fixed, per_token = self.fixed_s[index], self.per_kv_token_s[index]
        if index and not self.padded:
            below = index - 1
            part = (rows - self.rows[below]) / (self.rows[index] - self.rows[below])  # 0 … 1
            fixed = self.fixed_s[below] + part * (fixed - self.fixed_s[below])
            per_token = self.per_kv_token_s[below] + part * (per_token - self.per_kv_token_s[below])
        return fixed + per_token * kv_tokens

    def _beyond(self, rows: int) -> float:
        """More rows than were measured: on along the line through the last two sizes."""
        if len(self.rows) == 1:
            return self.fixed_s[0] * rows / self.rows[0]
        slope = (self.fixed_s[-1] - self.fixed_s[-2]) / (self.rows[-1] - self.rows[-2])
        return self.fixed_s[-1] + max(0.0, slope) * (rows - self.rows[-1])


@dataclass(frozen=True, slots=True)
class CostTable:
    """Make it by ``from_costs`` or ``from_dict``, which check what they are given."""

    curves: tuple[CostCurve, ...]  # ascending draft lengths; the first is plain's
    padded: bool  # a step of a size between two measured ones costs what the larger one costs
    ragged: tuple[StepCost, ...] = ()  # of steps whose rows have draft lengths of their own; just these sizes
    _by_length: Mapping[int, CostCurve] = field(init=False, repr=False, compare=False)
    _by_size: Mapping[RaggedSize, StepCost] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_length", {curve.draft_len: curve for curve in self.curves})
        by_size = {RaggedSize(cost.draft_len, cost.rows, cost.tokens): cost for cost in self.ragged}
        object.__setattr__(self, "_by_size", by_size)

    @staticmethod
    def from_costs(costs: Iterable[StepCost], padded: bool) -> CostTable:
        """Raises CostTableError."""
        found: dict[int, dict[int, StepCost]] = {}
        ragged: dict[RaggedSize, StepCost] = {}
        for cost in costs:
            _check(cost)
            if cost.tokens:
                size = RaggedSize(cost.draft_len, cost.rows, cost.tokens)
                if size in ragged:
                    raise CostTableError(f"two costs for {size}")
                ragged[size] = cost
                continue
            if cost.rows in found.setdefault(cost.draft_len, {}):
                raise CostTableError(f"two costs for {cost.draft_len} drafts and {cost.rows} rows")
            found[cost.draft_len][cost.rows] = cost
        if 0 not in found:
            raise CostTableError("no costs of plain steps (draft_len 0): measure them too")
        curves = tuple(_curve(found[k], padded) for k in sorted(found))
        return CostTable(curves, padded, tuple(ragged[size] for size in sorted(ragged)))

    @property
    def draft_lens(self) -> tuple[int, ...]:
        """Every length measured, 0 (plain) included, ascending."""
        return tuple(self._by_length)

    @property
    def costs(self) -> tuple[StepCost, ...]:
        """Of steps whose rows have the same draft length."""
        return tuple(
            StepCost(curve.draft_len, *values)
            for curve in self.curves
            for values in zip(curve.rows, curve.fixed_s, curve.per_kv_token_s, strict=True)
        )

    def max_rows(self, draft_len: int) -> int:
        """The largest size measured; 0 for a length that was not."""
        curve = self._by_length.get(draft_len)
        return curve.rows[-1] if curve else 0

    def cell(self, draft_len: int, rows: int) -> int | None:
        """Which of that length's measured sizes such a step counts as; None: the length was not measured."""
        curve = self._by_length.get(draft_len)
        return None if curve is None else curve.cell(rows)

    def seconds(self, draft_len: int, rows: int, kv_tokens: float) -> float:
        """Infinite for a length that was not measured: what is unknown is never the best choice."""
        curve = self._by_length.get(draft_len)
        return math.inf if curve is None else curve.seconds(rows, kv_tokens)

    def ragged_seconds(self, size: RaggedSize, kv_tokens: float) -> float:
        """Infinite for a size that was not measured."""
        cost = self._by_size.get(size)
        return math.inf if cost is None else cost.fixed_s + cost.per_kv_token_s * kv_tokens

    def to_dict(self) -> dict[str, Any]:
        return {"padded": self.padded, "costs": [_written(cost) for cost in (*self.costs, *self.ragged)]}

    @staticmethod
    def from_dict(data: object) -> CostTable:
        """Raises CostTableError."""
        if not isinstance(data, Mapping):
            raise CostTableError(f"a cost table is an object, not {type(data).__name__}")
        padded, costs = data.get("padded"), data.get("costs")
        if not isinstance(padded, bool):
            raise CostTableError(
                f"'padded' must be true (CUDA graphs) or false (eager steps), got {padded!r}"
            )
        if not isinstance(costs, Sequence) or isinstance(costs, str) or not costs:
            raise CostTableError("'costs' must be a list with at least one cost")
        return CostTable.from_costs([_read_cost(n, cost) for n, cost in enumerate(costs)], padded)


def _curve(by_rows: Mapping[int, StepCost], padded: bool) -> CostCurve:
    costs = [by_rows[rows] for rows in sorted(by_rows)]
    return CostCurve(
        draft_len=costs[0].draft_len,
        rows=tuple(cost.rows for cost in costs),
        fixed_s=tuple(cost.fixed_s for cost in costs),
        per_kv_token_s=tuple(cost.per_kv_token_s for cost in costs),
        padded=padded,
    )


def _written(cost: StepCost) -> dict[str, Any]:
    return {name: value for name, value in asdict(cost).items() if name != _TOKENS or value}


def _check(cost: StepCost) -> None:
    where = f"the cost of {cost.draft_len} drafts and {cost.rows} rows"
    if cost.tokens and not cost.rows < cost.tokens <= cost.rows * (cost.draft_len + 1):
        raise CostTableError(
            f"{where}: {cost.tokens} tokens must be more than the rows, and no more than their drafts allow"
        )
    if cost.draft_len < 0 or cost.rows < 1:
        raise CostTableError(f"{where}: drafts must be at least 0, rows at least 1")
    if not (math.isfinite(cost.fixed_s) and cost.fixed_s > 0):
        raise CostTableError(f"{where}: fixed_s must be a time above 0, got {cost.fixed_s}")
    if not (math.isfinite(cost.per_kv_token_s) and cost.per_kv_token_s >= 0):
        raise CostTableError(f"{where}: per_kv_token_s must be at least 0, got {cost.per_kv_token_s}")


def _read_cost(number: int, data: object) -> StepCost:
    names = ("draft_len", "rows", "fixed_s", "per_kv_token_s")
    if not isinstance(data, Mapping) or set(data) - {_TOKENS} != set(names):
        raise CostTableError(
            f"cost {number} needs just the fields {', '.join(names)} (and {_TOKENS} where rows have"
            f" draft lengths of their own), got {data!r}"
        )
    for name, value in data.items():
        kinds = int | float if name in names[2:] else int
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise CostTableError(f"cost {number}: {name} is no number of the right kind: {value!r}")
    seconds = float(data["fixed_s"]), float(data["per_kv_token_s"])
    return StepCost(data["draft_len"], data["rows"], *seconds, data.get(_TOKENS, 0))

"""Costs of steps as they turn out: a measured table, corrected by what steps really take.

Two kinds of correction, both factors (their logarithms are kept): one that all steps share (a device that
has grown warm, a busy host) and one for each draft length and size (a measurement that was off), which
fades: into the shared one while its step is run, away while it isn't. A step that took far longer than
expected moves them no further than one that took a little longer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from sglang.srt.speculative.cost_table import CostTable

COMMON_GAIN: Final = 0.02
CELL_GAIN: Final = 0.08
LARGEST_STEP: Final = 0.25  # of a logarithm: an outlier counts as 28 % too long
CORRECTION_KEPT: Final = 0.5 ** (1 / 4096)  # a step, of a cell's correction
EVIDENCE_KEPT: Final = 0.5 ** (1 / 512)
MOST_EVIDENCE: Final = 32.0
DOUBT: Final = 0.1  # a cell that has not run for long may be this much cheaper than it is thought


@dataclass(slots=True)
class _Cell:
    correction: float = 0.0  # logarithm
    evidence: float = 0.0  # steps, decayed
    seen_at: int = 0


class CostModel:
    def __init__(self, table: CostTable) -> None:
        self._table = table
        self._common = 0.0  # logarithm
        self._cells: dict[tuple[int, int], _Cell] = {}  # (draft_len, index of the size); one a table entry
        self._num_steps = 0

    @property
    def table(self) -> CostTable:
        return self._table

    def seconds(self, draft_len: int, rows: int, kv_tokens: float) -> float:
        return self.both_seconds(draft_len, rows, kv_tokens)[0]

    def both_seconds(self, draft_len: int, rows: int, kv_tokens: float) -> tuple[float, float]:
        """What such a step will take, and what it may take at best, as long as it hasn't been seen lately."""
        index = self._table.cell(draft_len, rows)
        if index is None:
            return math.inf, math.inf
        known = self._table.seconds(draft_len, rows, kv_tokens)
        cell = self._cells.get((draft_len, index))
        if cell is None:
            likely = known * math.exp(self._common)
            return likely, likely * (1.0 - DOUBT)
        age = self._num_steps - cell.seen_at
        likely = known * math.exp(self._common + cell.correction * CORRECTION_KEPT**age)
        return likely, likely * (1.0 - DOUBT / (1.0 + cell.evidence * EVIDENCE_KEPT**age))

    def observe(self, draft_len: int, rows: int, kv_tokens: float, seconds: float) -> None:
        """A decode step took ``seconds`` on the device."""
        index = self._table.cell(draft_len, rows)
        if index is None or not (math.isfinite(seconds) and seconds > 0):
            return
        self._num_steps += 1
        cell = self._cells.setdefault((draft_len, index), _Cell(seen_at=self._num_steps))
        age, cell.seen_at = self._num_steps - cell.seen_at, self._num_steps
        cell.correction *= CORRECTION_KEPT**age
        cell.evidence = min(cell.evidence * EVIDENCE_KEPT**age + 1.0, MOST_EVIDENCE)
        error = math.log(seconds / self._table.seconds(draft_len, rows, kv_tokens))
        error -= self._common + cell.correction
        error = min(max(error, -LARGEST_STEP), LARGEST_STEP)
        shared = (1.0 - CORRECTION_KEPT) * cell.correction
        self._common += COMMON_GAIN * error + shared
        cell.correction += CELL_GAIN * error - shared

    def figures(self) -> dict[str, Any]:
        """Factors on the table: the shared one, and those of the cells that ran, on top of it."""
        rows = {curve.draft_len: curve.rows for curve in self._table.curves}
        cells = {
            f"{k}x{rows[k][index]}": math.exp(
                cell.correction * CORRECTION_KEPT ** (self._num_steps - cell.seen_at)
            )
            for (k, index), cell in sorted(self._cells.items())
        }
        return {"common": math.exp(self._common), "by_draft_len_and_rows": cells}

"""Costs of steps as they turn out: a measured table, corrected by what steps really take.

Corrections are factors (their logarithms are kept) at three levels: one that all steps share (a device that
has grown warm, a busy host), one for each draft length, and one for each of its sizes (a measurement that was
off). The narrower ones fade: into the wider one while their step is run, away while it isn't. A step that
took far longer than expected moves them no further than one that took a little longer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from sglang.srt.model_executor.step_plan import RaggedSize
from sglang.srt.speculative.cost_table import CostTable

COMMON_GAIN: Final = 0.02
LENGTH_GAIN: Final = 0.04
CELL_GAIN: Final = 0.06
LARGEST_STEP: Final = 0.2  # of a logarithm: an outlier counts as 22 % too long
CORRECTION_KEPT: Final = 0.5 ** (1 / 4096)  # a step, of a length's and a size's correction
EVIDENCE_KEPT: Final = 0.5 ** (1 / 512)
MOST_EVIDENCE: Final = 32.0
DOUBT: Final = 0.1  # a cell that has not run for long may be this much cheaper than it is thought


@dataclass(slots=True)
class _Correction:
    """Of a draft length, or of one of its sizes."""

    value: float = 0.0  # logarithm
    evidence: float = 0.0  # steps, decayed
    seen_at: int = 0

    def value_at(self, now: int) -> float:
        return self.value * CORRECTION_KEPT ** (now - self.seen_at)

    def evidence_at(self, now: int) -> float:
        return self.evidence * EVIDENCE_KEPT ** (now - self.seen_at)

    def see(self, now: int) -> float:
        """Bring it up to now; what it gives to the wider one."""
        given = self.value_at(now) * (1.0 - CORRECTION_KEPT)
        self.value = self.value_at(now) - given
        self.evidence = min(self.evidence_at(now) + 1.0, MOST_EVIDENCE)
        self.seen_at = now
        return given


class CostModel:
    def __init__(self, table: CostTable) -> None:
        self._table = table
        self._common = 0.0  # logarithm
        self._lengths = {k: _Correction() for k in table.draft_lens}
        self._cells: dict[tuple[int, int], _Correction] = {}  # (draft_len, index of the size)
        self._ragged: dict[RaggedSize, _Correction] = {}
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
        now = self._num_steps
        cell = self._cells.get((draft_len, index))
        factor = self._common + self._lengths[draft_len].value_at(now)
        doubt = DOUBT
        if cell is not None:
            factor += cell.value_at(now)
            doubt /= 1.0 + cell.evidence_at(now)
        likely = self._table.seconds(draft_len, rows, kv_tokens) * math.exp(factor)
        return likely, likely * (1.0 - doubt)

    def ragged_seconds(self, size: RaggedSize, kv_tokens: float) -> float:
        """What a step of that size will take whose rows have draft lengths of their own."""
        seconds = self._table.ragged_seconds(size, kv_tokens)
        if seconds == math.inf:
            return seconds
        now, cell = self._num_steps, self._ragged.get(size)
        factor = self._common + self._lengths[size.draft_len].value_at(now)
        return seconds * math.exp(factor if cell is None else factor + cell.value_at(now))

    def observe(
        self, draft_len: int, rows: int, kv_tokens: float, seconds: float, size: RaggedSize | None = None
    ) -> None:
        """A decode step took ``seconds`` on the device; ``size``: of a ragged one."""
        index = self._table.cell(draft_len, rows)
        if size is None:
            expected = self._table.seconds(draft_len, rows, kv_tokens)
        else:
            expected = self._table.ragged_seconds(size, kv_tokens)
        known = index is not None and math.isfinite(expected)
        if not (known and math.isfinite(seconds) and seconds > 0):
            return
        assert index is not None
        self._num_steps += 1
        length, fresh = self._lengths[draft_len], _Correction(seen_at=self._num_steps)
        if size is None:
            cell = self._cells.setdefault((draft_len, index), fresh)
        else:
            cell = self._ragged.setdefault(size, fresh)
        to_length, to_common = cell.see(self._num_steps), length.see(self._num_steps)
        length.value += to_length
        self._common += to_common
        error = math.log(seconds / expected) - (self._common + length.value + cell.value)
        error = min(max(error, -LARGEST_STEP), LARGEST_STEP)
        self._common += COMMON_GAIN * error
        length.value += LENGTH_GAIN * error
        cell.value += CELL_GAIN * error

    def figures(self) -> dict[str, Any]:
        """Factors on the table: the shared one, and on top of it those of the lengths and sizes that ran."""
        now = self._num_steps
        rows = {curve.draft_len: curve.rows for curve in self._table.curves}
        lengths = {str(k): math.exp(c.value_at(now)) for k, c in self._lengths.items() if c.evidence}
        cells = {
            f"{k}x{rows[k][index]}": math.exp(cell.value_at(now))
            for (k, index), cell in sorted(self._cells.items())
        }
        figures = {
            "common": math.exp(self._common),
            "by_draft_len": lengths,
            "by_draft_len_and_rows": cells,
        }
        if self._ragged:
            figures["by_draft_len_rows_and_tokens"] = {
                f"{size.draft_len}x{size.rows}:{size.tokens}": math.exp(cell.value_at(now))
                for size, cell in sorted(self._ragged.items())
            }
        return figures

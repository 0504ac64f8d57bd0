"""Steps with prefill on the pad slot, which a server runs before it serves.

They write to the pad page and change no state, so no pool is needed for them. What the largest one needs of
memory is needed by every other; and a kernel that any of them needs is compiled by one of the small ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang.srt.model_executor.step_plan import PAD_SLOT, PrefillChunk, StepKind, StepPlan


def largest_prefill(num_tokens: int, num_slots: int, context_len: int) -> StepPlan:
    """Of ``num_tokens`` tokens in as many rows as there are slots, each of which chooses a token; the first
    has the longest prefix there may be."""
    num_tokens = min(num_tokens, num_slots * context_len)
    num_rows = min(num_slots, num_tokens)
    lengths = [num_tokens // num_rows + (row < num_tokens % num_rows) for row in range(num_rows)]
    starts = [context_len - lengths[0]] + [0] * (num_rows - 1)
    chunks = (PrefillChunk(PAD_SLOT, *row, None) for row in zip(starts, map(_ids, lengths), strict=True))
    return StepPlan(0, StepKind.PREFILL, prefill=tuple(chunks))


def _ids(length: int) -> tuple[int, ...]:
    return (0,) * length


def small_prefills(row_classes: Sequence[int], num_slots: int, context_len: int) -> list[StepPlan]:
    """One step of every kind that compiles kernels of its own, but for those only the largest one needs.

    row_classes: numbers of rows, ascending, up to which products have the same kernels. Products see the
    step's tokens, an lm_head its rows; decode rows beside a chunk are planned by the next power of two.
    """
    steps = [_step(0, min(tokens, context_len)) for tokens in (*row_classes, row_classes[-1] + 1)]
    num_rows = [rows for rows in row_classes if rows > 1]
    while num_rows[-1] <= num_slots:
        num_rows.append(2 * num_rows[-1])
    num_decode = sorted({min(rows - 1, num_slots) for rows in num_rows})
    return steps + [_step(rows, 1) for rows in num_decode]


def _step(num_decode: int, num_tokens: int) -> StepPlan:
    """A chunk beside so many decode rows."""
    chunk = PrefillChunk(PAD_SLOT, 0, _ids(num_tokens), None)
    if num_decode == 0:
        return StepPlan(0, StepKind.PREFILL, prefill=(chunk,))
    return StepPlan(0, StepKind.MIXED, (PAD_SLOT,) * num_decode, (1,) * num_decode, prefill=(chunk,))


def prefill_tokens(chunk: int, max_prefill_tokens: int, context_len: int) -> int:
    """Most prompt tokens of one step. ``chunk`` -1: prompts stay whole, even the longest there is."""
    return min(chunk, max_prefill_tokens) if chunk > 0 else max(max_prefill_tokens, context_len)

"""The largest prefill step, on the pad slot: what it needs of memory is needed by every other one."""

from __future__ import annotations

from sglang.srt.model_executor.step_plan import PAD_SLOT, PrefillChunk, StepKind, StepPlan


def largest_prefill(num_tokens: int, num_slots: int, context_len: int) -> StepPlan:
    """Of ``num_tokens`` tokens in as many rows as there are slots, each of which chooses a token.

    Chunks of the pad slot write to the pad page and change no state, so no pool is needed for it.
    """
    num_tokens = min(num_tokens, num_slots * context_len)
    num_rows = min(num_slots, num_tokens)
    lengths = [num_tokens // num_rows + (row < num_tokens % num_rows) for row in range(num_rows)]
    chunks = tuple(PrefillChunk(PAD_SLOT, 0, (0,) * length, None) for length in lengths)
    return StepPlan(0, StepKind.PREFILL, prefill=chunks)


def prefill_tokens(chunk: int, max_prefill_tokens: int, context_len: int) -> int:
    """Most prompt tokens of one step. ``chunk`` -1: prompts stay whole, even the longest there is."""
    return min(chunk, max_prefill_tokens) if chunk > 0 else max(max_prefill_tokens, context_len)

"""Texts of requests that stay on a GPU, for drafters that know nothing of a request but its tokens."""

from __future__ import annotations

from sgl_kernel.speculation.accept import Accepted
from sgl_kernel.speculation.lookup.ops import note
from sglang.srt.model_executor.decode_step import Rows
from sglang.srt.model_executor.step_plan import PAD_SLOT
from sglang.srt.speculative.history import TokenHistory


def note_accepted(history: TokenHistory, rows: Rows, accepted: Accepted) -> None:
    """What a step put out, behind what is there: nothing comes from the host, so a graph holds it."""
    note(
        history.ids, rows.slots, rows.root, accepted.tokens, accepted.counts, pad_slot=PAD_SLOT, pdl=rows.pdl
    )

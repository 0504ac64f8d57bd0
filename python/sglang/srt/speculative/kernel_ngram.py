"""Drafts out of a request's own text inside a device step; ``ngram_worker.py`` is the oracle.

The texts are on the device and every step notes what it put out, so nothing comes from the host: a graph
holds all of it, and the next step may be launched before this one's tokens are known.
"""

from __future__ import annotations

import torch

from sgl_kernel.speculation.accept import Accepted
from sgl_kernel.speculation.lookup.ops import look_up
from sglang.srt.model_executor.decode_step import Rows
from sglang.srt.model_executor.drafter import DraftTree
from sglang.srt.speculative.history import TokenHistory
from sglang.srt.speculative.kernel_history import note_accepted
from sglang.srt.speculative.ngram_worker import LONGEST_MATCH


class KernelNgram:
    """Implements ``DeviceDrafter`` for chains."""

    aux_layers: tuple[int, ...] = ()

    def __init__(self, history: TokenHistory) -> None:
        """``history``: of int32 ids, with those of prompts and of steps with prompts noted by others."""
        self._history = history

    def draft(self, rows: Rows, tokens: torch.Tensor, draft_len: int) -> DraftTree | None:
        look_up(
            self._history.ids, rows.slots, rows.root, tokens[:, : draft_len + 1], LONGEST_MATCH, pdl=rows.pdl
        )
        return None

    def sync(
        self,
        rows: Rows,
        aux: torch.Tensor,
        accepted: Accepted,
        is_tree: bool,
        token_of: torch.Tensor | None = None,
    ) -> None:
        """Nothing but the tokens counts."""
        note_accepted(self._history, rows, accepted)

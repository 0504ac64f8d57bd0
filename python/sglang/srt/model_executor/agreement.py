"""A check that ranks have the same state, for when it is doubted (``SGLANG_CHECK_RANKS_AGREE=1``).

It costs a collective a step, and on a GPU waits for it.
"""

from __future__ import annotations

from typing import Final

import torch

from sglang.srt.distributed.tensor_parallel import TensorParallel
from sglang.srt.model_executor.slot_state import SlotState

CHECK_VARIABLE: Final = "SGLANG_CHECK_RANKS_AGREE"

_SLOT, _LEN, _TOKEN = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


class Agreement:
    """Compares hashes of (seq_len, next_token) of all slots."""

    def __init__(self, tp: TensorParallel, state: SlotState) -> None:
        self._tp = tp
        self._state = state

    def check(self, step_id: int) -> None:
        """Called by all ranks; all of them fail if any two differ."""
        state = self._state
        slots = torch.arange(len(state.seq_len), device=state.device) + 1
        mixed = slots * _SLOT ^ state.seq_len.to(torch.int64) * _LEN ^ state.next_token * _TOKEN
        mixed = (mixed ^ (mixed >> 31)) * _LEN  # products wrap
        hashes = self._tp.collectives.all_gather(mixed.sum()[None])[:, 0].tolist()
        assert len(set(hashes)) == 1, f"ranks disagree after step {step_id}: hashes of their states {hashes}"

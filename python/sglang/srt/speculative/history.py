"""The ids of every slot on the device, for drafters that know nothing of a request but its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang.srt.model_executor.step_plan import SlotAdmission
from sglang.srt.utils.upload import upload


class TokenHistory:
    """Filled by admission (what a prefix hit leaves out of the prefill) and by syncs."""

    def __init__(
        self,
        num_rows: int,
        max_positions: int,
        device: torch.device,
        unknown: int = 0,
        dtype: torch.dtype = torch.int64,
    ) -> None:
        """``unknown`` stands where no id was told."""
        self._unknown = unknown
        self.ids = torch.full((num_rows, max_positions), unknown, dtype=dtype, device=device)

    def admit(self, admissions: Sequence[SlotAdmission]) -> None:
        for admission in admissions:
            row = self.ids[admission.slot]
            row.fill_(self._unknown)
            row[: len(admission.known_ids)] = upload(admission.known_ids, row.dtype, row.device)

    def append(self, slots: torch.Tensor, positions: torch.Tensor, next_ids: torch.Tensor) -> None:
        """[T] int64 each: x_{t+1} of the pairs at t. Those past a row's new length are written again."""
        self.ids[slots, positions + 1] = next_ids.to(self.ids.dtype)

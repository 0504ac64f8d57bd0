"""Frequency, presence and repetition penalties over the tokens a request has put out."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang.srt.model_executor.step_plan import SlotAdmission, SlotSampling
from sglang.srt.sampling.rows import ChoiceRows, RowPick
from sglang.srt.utils.upload import upload


def asks_for_penalties(sampling: SlotSampling) -> bool:
    additive = sampling.frequency_penalty != 0 or sampling.presence_penalty != 0
    return additive or sampling.repetition_penalty != 1


class PenaltiesState:
    """Output counts of every slot, kept only once a request has asked for a penalty.

    SGLang's definitions: the prompt does not count; additive penalties first
    (``frequency * count + presence * (count > 0)`` is subtracted), then the logits of ids put out
    already are divided by ``repetition`` if they are positive and multiplied by it if not.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self._wanted_cpu = [False] * num_rows
        self.frequency = torch.zeros(num_rows, dtype=torch.float32, device=device)  # [slots]
        self.presence = torch.zeros(num_rows, dtype=torch.float32, device=device)  # [slots]
        self.repetition = torch.ones(num_rows, dtype=torch.float32, device=device)  # [slots]
        self._counts: torch.Tensor | None = None  # [slots, V] int32, x_L included

    @property
    def counts(self) -> torch.Tensor:
        """[slots, V] int32: how often each id is among the slot's outputs, x_L included."""
        if self._counts is None:
            shape = (len(self._wanted_cpu), self._vocab_size)
            self._counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
        return self._counts

    def admit(self, admissions: Sequence[SlotAdmission]) -> None:
        for a in admissions:
            self._wanted_cpu[a.slot] = asks_for_penalties(a.sampling)
        for a in filter(lambda a: self._wanted_cpu[a.slot], admissions):
            self.frequency[a.slot] = a.sampling.frequency_penalty
            self.presence[a.slot] = a.sampling.presence_penalty
            self.repetition[a.slot] = a.sampling.repetition_penalty
            self.counts[a.slot] = 0
            if a.output_ids:
                ids = upload(a.output_ids, torch.int64, self._device)
                self.counts[a.slot].scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))

    def needs(self, slot: int) -> bool:
        return self._wanted_cpu[slot]

    def apply(self, logits: torch.Tensor, rows: ChoiceRows) -> torch.Tensor:
        """[R, N, V] -> the same shape, every node with the counts of its own path."""
        slots, nodes = rows.slots, rows.num_nodes
        counts = self.counts[slots][:, None, :].repeat(1, nodes, 1)
        if nodes > 1:
            drafts = rows.tokens[:, None, :].expand(-1, nodes, -1)
            counts.scatter_add_(-1, drafts, rows.ancestors().to(counts.dtype))

        def of(row: torch.Tensor) -> torch.Tensor:
            return row[slots].to(logits.dtype)[:, None, None]

        seen = counts > 0
        logits = logits - of(self.frequency) * counts - of(self.presence) * seen
        scale = torch.where(seen, of(self.repetition), 1.0)
        return torch.where(logits < 0, logits * scale, logits / scale)

    def count(self, picked: RowPick, tokens: torch.Tensor, num_tokens: torch.Tensor) -> None:
        """Add what the picked rows put out. tokens: [R', C] int64; num_tokens: [R'] int64."""
        column = torch.arange(tokens.shape[1], device=tokens.device)
        valid = (column < num_tokens[:, None]).to(torch.int32)
        flat = picked.rows.slots[:, None] * self._vocab_size + tokens
        self.counts.view(-1).scatter_add_(0, flat.reshape(-1), valid.reshape(-1))

"""Rules about single ids: biases, and ids that may not be chosen before enough outputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang.srt.model_executor.step_plan import SlotAdmission
from sglang.srt.sampling.rows import ChoiceRows
from sglang.srt.utils.upload import upload


class _IdLists:
    """A list of token ids a slot, as one tensor that grows to the longest list asked for."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self.ids = torch.zeros(num_rows, 0, dtype=torch.int64, device=device)  # [slots, K]

    def put(self, slot: int, ids: Sequence[int]) -> None:
        """The list of ``slot``, its first id repeated to fill the row."""
        assert ids and min(ids) >= 0 and max(ids) < self._vocab_size, (
            f"token ids outside the vocabulary of {self._vocab_size}: {ids}"
        )
        width = self.ids.shape[1]
        if len(ids) > width:
            # Old rows repeat their own first id, so that a repeated write stays the same write.
            first = self.ids[:, :1] if width else self.ids.new_zeros(len(self.ids), 1)
            self.ids = torch.cat([self.ids, first.expand(-1, len(ids) - width)], dim=1)
            width = len(ids)
        filled = list(ids) + [ids[0]] * (width - len(ids))
        self.ids[slot] = upload(filled, torch.int64, self.ids.device)


class LogitBiasState:
    """``logit_bias``: a number added to the logit of an id."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._wanted_cpu = [False] * num_rows
        self._lists = _IdLists(num_rows, vocab_size, device)
        self._bias = torch.zeros(num_rows, 0, dtype=torch.float32, device=device)  # [slots, K]

    def admit(self, admissions: Sequence[SlotAdmission]) -> None:
        for a in admissions:
            self._wanted_cpu[a.slot] = bool(a.sampling.logit_bias)
            if a.sampling.logit_bias:
                ids, biases = zip(*a.sampling.logit_bias, strict=True)
                self._lists.put(a.slot, ids)
                width = self._lists.ids.shape[1]
                self._bias = torch.nn.functional.pad(self._bias, (0, width - self._bias.shape[1]))
                filled = list(biases) + [0.0] * (width - len(biases))
                self._bias[a.slot] = upload(filled, torch.float32, self._bias.device)

    def needs(self, slot: int) -> bool:
        return self._wanted_cpu[slot]

    def apply(self, logits: torch.Tensor, rows: ChoiceRows) -> torch.Tensor:
        """[R, N, V] -> the same tensor."""
        shape = (-1, rows.num_nodes, -1)
        ids = self._lists.ids[rows.slots][:, None, :].expand(shape)
        bias = self._bias[rows.slots].to(logits.dtype)[:, None, :].expand(shape)
        return logits.scatter_add_(-1, ids, bias)


class MinNewTokensState:
    """Ids (stop ids, as the scheduler knows them) suppressed before ``min_new_tokens`` outputs."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._wanted_cpu = [False] * num_rows
        self._lists = _IdLists(num_rows, vocab_size, device)
        self._free_from = torch.zeros(num_rows, dtype=torch.int64, device=device)  # [slots] index

    def admit(self, admissions: Sequence[SlotAdmission]) -> None:
        for a in admissions:
            ids = a.sampling.suppressed_ids
            self._wanted_cpu[a.slot] = a.sampling.min_new_tokens > 0 and bool(ids)
            if self._wanted_cpu[a.slot]:
                self._lists.put(a.slot, ids)
                self._free_from[a.slot] = a.prompt_len + a.sampling.min_new_tokens

    def needs(self, slot: int) -> bool:
        return self._wanted_cpu[slot]

    def apply(self, logits: torch.Tensor, rows: ChoiceRows) -> torch.Tensor:
        """[R, N, V] -> the same tensor."""
        ids = self._lists.ids[rows.slots][:, None, :].expand(-1, rows.num_nodes, -1)
        early = rows.index() < self._free_from[rows.slots][:, None]  # [R, N]
        kept = logits.gather(-1, ids)
        return logits.scatter_(-1, ids, torch.where(early[:, :, None], -torch.inf, kept))

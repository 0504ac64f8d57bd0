"""Per-slot sampling parameters on the device, and the choice at a temperature."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang.srt.model_executor.step_plan import SlotAdmission, SlotSampling
from sglang.srt.sampling.filters import FilterLimits, filter_scores
from sglang.srt.sampling.gumbel import noise
from sglang.srt.sampling.rows import ChoiceRows
from sglang.srt.sampling.sampling_params import GREEDY_BELOW
from sglang.srt.utils.upload import upload

NO_CAP = 2**31 - 1


def is_sampled(sampling: SlotSampling) -> bool:
    """Whether noise takes part in the slot's choices."""
    return sampling.temperature >= GREEDY_BELOW and sampling.top_k != 1


def is_filtered(sampling: SlotSampling) -> bool:
    """Whether some ids may be excluded. A greedy choice is never changed by a filter."""
    limited = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    return is_sampled(sampling) and limited


class SamplingStates:
    """Owner of the sampling rows of every slot; the host keeps which slots need what."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        def full(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
            column = torch.tensor(values, dtype=dtype, device=device)[:, None]
            return column.repeat(1, num_rows)

        # Rows of one tensor a type, so that an admission is one copy and one write each.
        self._floats = full([0, 1, 0], torch.float32)
        self._ints = full([vocab_size, 0, NO_CAP], torch.int64)
        self.temperature = self._floats[0]  # [slots]; 0: greedy
        self.top_p = self._floats[1]  # [slots]
        self.min_p = self._floats[2]  # [slots]
        self.top_k = self._ints[0]  # [slots]; vocab_size: all
        self.seed = self._ints[1]  # [slots]
        self.draft_cap = self._ints[2]  # [slots] most drafts accepted a step
        self._vocab_ids = torch.arange(vocab_size, device=device)  # [V] int64
        self._vocab_size = vocab_size
        self._sampled_cpu = [False] * num_rows
        self._filtered_cpu = [False] * num_rows

    @property
    def bytes(self) -> int:
        return self._floats.nbytes + self._ints.nbytes + self._vocab_ids.nbytes

    def admit(self, admissions: Sequence[SlotAdmission]) -> None:
        """Set the rows of slots that begin a new life."""
        slots = upload([a.slot for a in admissions], torch.int64, self.seed.device)
        params = [a.sampling for a in admissions]
        for a in admissions:
            self._sampled_cpu[a.slot] = is_sampled(a.sampling)
            self._filtered_cpu[a.slot] = is_filtered(a.sampling)
        temperature = [p.temperature if is_sampled(p) else 0.0 for p in params]
        floats = [temperature, [p.top_p for p in params], [p.min_p for p in params]]
        self._floats[:, slots] = upload(floats, torch.float32, slots.device)
        ints = [
            [p.top_k if p.top_k > 0 else self._vocab_size for p in params],
            [_signed64(p.seed) for p in params],
            [NO_CAP if p.draft_cap is None else p.draft_cap for p in params],
        ]
        self._ints[:, slots] = upload(ints, torch.int64, slots.device)

    def is_sampled(self, slot: int) -> bool:
        return self._sampled_cpu[slot]

    def is_filtered(self, slot: int) -> bool:
        return self._filtered_cpu[slot]

    def scores(self, logits: torch.Tensor, rows: ChoiceRows) -> torch.Tensor:
        """What the argmax is taken of, for rows that are all sampled.

        logits: [R, N, V], processed; returns logits / T, filtered, plus noise; same shape.
        """
        scores = logits / self.temperature[rows.slots].to(logits.dtype)[:, None, None]
        picked = rows.pick(self.is_filtered)
        if picked is not None:
            part = picked.of(scores)
            slots = picked.rows.slots.repeat_interleave(rows.num_nodes)
            limits = FilterLimits(self.top_k[slots], self.top_p[slots], self.min_p[slots])
            picked.put(scores, filter_scores(part.flatten(0, 1), limits).view_as(part))
        return scores.add_(self._noise(rows, scores.dtype))

    def _noise(self, rows: ChoiceRows, dtype: torch.dtype) -> torch.Tensor:
        """[R, N, V]. Nodes of one row and depth share theirs, so it is drawn once a depth."""
        num_rows, num_nodes = rows.tokens.shape
        num_depths = num_nodes if rows.mask is None else min(rows.num_depths, num_nodes)
        depth = torch.arange(num_depths, device=rows.slots.device)
        index = (rows.root_index[:, None] + 1 + depth).reshape(-1)
        seed = self.seed[rows.slots].repeat_interleave(num_depths)
        drawn = noise(seed, index, self._vocab_ids, dtype).view(num_rows, num_depths, -1)
        if rows.mask is None:
            return drawn
        row = torch.arange(num_rows, device=depth.device)[:, None]
        return drawn[row, rows.depths]

    def draft_scores(
        self, logits: torch.Tensor, slots: torch.Tensor, index: torch.Tensor, token_ids: torch.Tensor
    ) -> torch.Tensor:
        """What a drafter ranks: logits / T + noise at the same target ids; raw logits if greedy.

        logits: [R, N, V']; slots: [R]; index: [R] of the token guessed; token_ids: [V'] target ids.
        The N nodes of a row guess a token of the same index, so they share its noise.
        """
        temperature = self.temperature[slots].to(logits.dtype)[:, None, None]
        sampled = temperature > 0
        drawn = noise(self.seed[slots], index, token_ids, logits.dtype)[:, None, :]
        warm = logits / torch.where(sampled, temperature, 1.0) + drawn
        return torch.where(sampled, warm, logits)


def _signed64(seed: int) -> int:
    """The seed's low 64 bits as int64 holds them."""
    seed &= 2**64 - 1
    return seed - 2**64 if seed >= 2**63 else seed

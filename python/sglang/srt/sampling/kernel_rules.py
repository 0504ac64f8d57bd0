"""Penalties, biases and suppressed ids of every slot, as sgl_kernel's ops take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from itertools import chain

import torch

from sgl_kernel.sampling.rules.ops import Asks, RuleStates
from sglang.srt.model_executor.step_plan import SlotAdmission, SlotSampling
from sglang.srt.sampling.penalties import asks_for_penalties
from sglang.srt.sampling.sampling_params import MAX_LOGIT_BIASES, MAX_STOP_IDS
from sglang.srt.utils.upload import upload

MAX_SUPPRESSED = MAX_STOP_IDS + 256
"""Ids suppressed before ``min_new_tokens``: the user's stop ids, and room for the model's own."""


class KernelRules:
    """Owner of the rows. All are made once, at their full size: a CUDA graph holds their addresses.

    Penalties take the largest part, ``[slots, V]`` int32.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """``num_rows`` counts the pad slot's row too, which never asks for anything."""

        def zeros(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        # Rows of one tensor a type, so that an admission is one copy and one write each.
        self._ints = zeros(torch.int32, 3, num_rows)
        self._floats = zeros(torch.float32, 3, num_rows)
        self._floats[2] = 1  # a repetition penalty of 1 changes nothing
        self.states = RuleStates(
            asks=self._ints[0],
            token_counts=zeros(torch.int32, num_rows, vocab_size),
            frequency=self._floats[0],
            presence=self._floats[1],
            repetition=self._floats[2],
            bias_ids=zeros(torch.int64, num_rows, MAX_LOGIT_BIASES),
            biases=zeros(torch.float32, num_rows, MAX_LOGIT_BIASES),
            num_biases=self._ints[1],
            suppressed_ids=zeros(torch.int64, num_rows, MAX_SUPPRESSED),
            num_suppressed=self._ints[2],
            free_from=zeros(torch.int64, num_rows),
        )
        self._device = device

    @property
    def bytes(self) -> int:
        return sum(getattr(self.states, f.name).nbytes for f in fields(RuleStates))

    def admit(self, admissions: Sequence[SlotAdmission]) -> None:
        """Set the rows of slots that begin a new life; nothing waits for the device.

        Lists and counts are written for those that ask only: without its flag nobody reads them.
        """
        self._check(admissions)
        params = [a.sampling for a in admissions]
        asks = [_asks(p) for p in params]
        free_from = [a.prompt_len + a.sampling.min_new_tokens for a in admissions]
        slots = upload([a.slot for a in admissions], torch.int64, self._device)
        self._ints[:, slots] = upload(
            [
                [int(flags) for flags in asks],
                [len(p.logit_bias) for p in params],
                [len(p.suppressed_ids) for p in params],
            ],
            torch.int32,
            self._device,
        )
        self._floats[:, slots] = upload(
            [
                [p.frequency_penalty for p in params],
                [p.presence_penalty for p in params],
                [p.repetition_penalty for p in params],
            ],
            torch.float32,
            self._device,
        )
        self.states.free_from[slots] = upload(free_from, torch.int64, self._device)
        asking = list(zip(admissions, asks, strict=True))
        self._restart_counts([a for a, flags in asking if Asks.PENALTIES in flags])
        self._put_biases([a for a, flags in asking if Asks.BIASES in flags])
        self._put_suppressed([a for a, flags in asking if Asks.SUPPRESSION in flags])

    def _check(self, admissions: Sequence[SlotAdmission]) -> None:
        vocab_size = self.states.token_counts.shape[1]
        for a in admissions:
            biases, suppressed = a.sampling.logit_bias, a.sampling.suppressed_ids
            assert len(biases) <= MAX_LOGIT_BIASES, f"{len(biases)} biases, room for {MAX_LOGIT_BIASES}"
            assert len(suppressed) <= MAX_SUPPRESSED, f"{len(suppressed)} ids, room for {MAX_SUPPRESSED}"
            for token in chain((token for token, _ in biases), suppressed, a.output_ids):
                assert 0 <= token < vocab_size, f"token id {token} is not in the vocabulary of {vocab_size}"

    def _restart_counts(self, admissions: Sequence[SlotAdmission]) -> None:
        if not admissions:
            return
        counts = self.states.token_counts
        slots = upload([a.slot for a in admissions], torch.int64, self._device)
        counts.index_fill_(0, slots, 0)  # ``counts[slots] = 0`` would wait for the device on CUDA
        places = [a.slot * counts.shape[1] + token for a in admissions for token in a.output_ids]
        if places:
            index = upload(places, torch.int64, self._device)
            counts.view(-1).scatter_add_(0, index, torch.ones_like(index, dtype=torch.int32))

    def _put_biases(self, admissions: Sequence[SlotAdmission]) -> None:
        if admissions:
            index = self._put_lists(
                self.states.bias_ids,
                [(a.slot, [token for token, _ in a.sampling.logit_bias]) for a in admissions],
            )
            values = [bias for a in admissions for _, bias in a.sampling.logit_bias]
            self.states.biases[index] = upload(values, torch.float32, self._device)

    def _put_suppressed(self, admissions: Sequence[SlotAdmission]) -> None:
        if admissions:
            lists = [(a.slot, a.sampling.suppressed_ids) for a in admissions]
            self._put_lists(self.states.suppressed_ids, lists)

    def _put_lists(
        self, target: torch.Tensor, lists: Sequence[tuple[int, Sequence[int]]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write (slot, ids) to the beginning of rows of ``target``; returns where, as an index."""
        slots = [slot for slot, ids in lists for _ in ids]
        columns = [column for _, ids in lists for column in range(len(ids))]
        tokens = [token for _, ids in lists for token in ids]
        places = upload([slots, columns, tokens], torch.int64, self._device)  # [3, E]
        target[places[0], places[1]] = places[2]
        return places[0], places[1]


def _asks(sampling: SlotSampling) -> Asks:
    asks = Asks(0)
    if asks_for_penalties(sampling):
        asks |= Asks.PENALTIES
    if sampling.logit_bias:
        asks |= Asks.BIASES
    if sampling.min_new_tokens > 0 and sampling.suppressed_ids:
        asks |= Asks.SUPPRESSION
    return asks

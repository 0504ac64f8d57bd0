"""An independent draft model on a GPU: its drafts inside a device step, and what it reads beside the steps.

Let V leading tokens of a row have entries in the model's cache. The first draft forward takes the last two
tokens, x_{L-1} and x_L, so it needs V >= L - 1. Behind a speculative step that is so, however many drafts
were accepted; prompts are read in the step that prefills them. Only a plain step leaves a row one token
further behind. So the host knows how far behind a row is, and of one that is far behind its length too, since
its last steps were plain. Before the next speculative step the model catches up: a few tokens of all rows by
one window before x_{L-1}, which is found on the device; more as prompts are read, many of many rows at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import torch

from sgl_kernel.speculation.accept import Accepted
from sglang.srt.layers.attention.base import DecodeRows, KernelAttention, PrefillRows
from sglang.srt.model_executor.decode_step import Rows
from sglang.srt.model_executor.drafter import DraftContext, DraftTree
from sglang.srt.model_executor.slot_state import SlotState
from sglang.srt.model_executor.step_plan import PAD_SLOT, PrefillChunk, SlotAdmission, StepPlan
from sglang.srt.models.decoder import DecoderModel
from sglang.srt.sampling.kernel_sampler import KernelSampler
from sglang.srt.speculative.history import TokenHistory
from sglang.srt.speculative.kernel_history import note_accepted
from sglang.srt.utils.upload import ints, ranges, upload, upload_all

WINDOW: Final = 16
"""Tokens that are caught up with by a window: one number, since kernels are compiled for each. More than
there are ever steps in flight: behind so many plain ones a row's length is known."""

CHUNK: Final = 2048
"""Most tokens that are read at once of what this model alone lacks: prompts that the target has from its
prefix cache, and what was decoded plainly."""


class Piece(NamedTuple):
    """Tokens of one slot."""

    slot: int
    start: int
    length: int


class KernelStandalone:
    """Implements ``DeviceDrafter`` for chains."""

    aux_layers: tuple[int, ...] = ()

    def __init__(
        self,
        model: DecoderModel,
        backend: KernelAttention,  # bound to the model's pool, which has the target's pages
        sampler: KernelSampler,
        history: TokenHistory,
    ) -> None:
        self._model = model
        self._backend = backend
        self._sampler = sampler
        self._history = history
        self._target_ids = torch.arange(model.config.vocab_size, device=history.ids.device)

    def draft(self, rows: Rows, tokens: torch.Tensor, draft_len: int) -> DraftTree | None:
        slots = rows.slots
        base = (rows.root - 1).clamp_(min=0)  # [R]; a padded row may have no token before its last
        ids = torch.stack((self._history.ids[slots, base].to(torch.int64), tokens[:, 0]), 1)  # [R, 2]
        hidden = self._forward(ids, slots, base).view(len(slots), 2, -1)[:, 1]
        self._guess(rows, hidden, tokens, 1)
        for i in range(2, draft_len + 1):
            hidden = self._forward(tokens[:, i - 1 : i], slots, rows.root + (i - 1))
            self._guess(rows, hidden, tokens, i)
        return None

    def sync(
        self,
        rows: Rows,
        aux: torch.Tensor,
        accepted: Accepted,
        is_tree: bool,
        token_of: torch.Tensor | None = None,
    ) -> None:
        """The tokens alone: the model reads them when it drafts."""
        note_accepted(self._history, rows, accepted)

    def _guess(self, rows: Rows, hidden: torch.Tensor, tokens: torch.Tensor, i: int) -> None:
        """Column i of ``tokens``. hidden: [R, H]."""
        logits = self._model.logits(hidden.contiguous())
        self._sampler.guess(logits, rows.slots, rows.root, i, self._target_ids, tokens[:, i])

    def _forward(self, ids: torch.Tensor, slots: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        return read_rows(self._model, self._backend, ids, slots, base)


class StandaloneReader:
    """Implements ``Drafter`` but for drafting, and ``PlanReader``: what is read outside device steps."""

    aux_layers: tuple[int, ...] = ()

    def __init__(
        self, model: DecoderModel, backend: KernelAttention, state: SlotState, history: TokenHistory
    ) -> None:
        self._model = model
        self._backend = backend
        self._state = state
        self._history = history
        self._behind: dict[int, int] = {}  # slot -> by how many tokens V may be less than L - 1

    def admit(self, admissions: Sequence[SlotAdmission]) -> None:
        self._history.admit(admissions)

    def draft(self, ctx: DraftContext, draft_len: int) -> DraftTree:
        raise AssertionError("on a GPU drafts are made in device steps")

    def feature(self, aux: torch.Tensor) -> torch.Tensor:
        return aux

    def sync(
        self, next_ids: torch.Tensor, features: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
    ) -> None:
        self._history.append(slots, positions, next_ids)

    def read(self, plan: StepPlan) -> None:
        """Before the plan's step, behind its admissions and page writes."""
        for admission in plan.admissions:
            self._read_known(admission)
        if plan.prefill:
            self._prefill(plan.prefill)
        self._behind |= {chunk.slot: -1 for chunk in plan.prefill}
        if plan.draft_len:
            self._catch_up(plan.decode_slots, plan.decode_len_bounds)
            self._behind |= dict.fromkeys(plan.decode_slots, 0)
        else:
            self._behind |= {slot: self._behind.get(slot, 0) + 1 for slot in plan.decode_slots}

    def _catch_up(self, slots: Sequence[int], len_bounds: Sequence[int]) -> None:
        """A window that would begin before the text begins with it, and what it then reads too much is read
        again. ``len_bounds``: L of each slot, or more where drafts of a step in flight may be accepted.
        """
        few, many = [], []
        for slot, bound in zip(slots, len_bounds, strict=True):
            behind = self._behind.get(slot, 0)
            if behind > WINDOW and slot != PAD_SLOT:
                start = max(0, bound - 1 - behind)
                many.append(Piece(slot, start, bound - 1 - start))
            elif behind > 0 and slot != PAD_SLOT:
                few.append(slot)
        for pieces in chunked(many, CHUNK):
            self._read_pieces(pieces)
        if few:
            rows = upload(few, torch.int64, self._history.ids.device)
            base = self._state.seq_len[rows].to(torch.int64) - (1 + WINDOW)
            self._read_window(rows, base.clamp_(min=0))

    def warm_up(self) -> None:
        """Compile what only catching up runs."""
        slots = torch.full((1,), PAD_SLOT, dtype=torch.int64, device=self._history.ids.device)
        self._read_window(slots, torch.zeros_like(slots))

    def _read_window(self, slots: torch.Tensor, base: torch.Tensor) -> None:
        """slots, base: [R] int64."""
        columns = base[:, None] + torch.arange(WINDOW, device=base.device)  # [R, WINDOW]
        ids = self._history.ids[slots[:, None], columns.clamp(max=self._history.ids.shape[1] - 1)]
        read_rows(self._model, self._backend, ids.to(torch.int64), slots, base)

    def _read_pieces(self, pieces: Sequence[Piece]) -> None:
        """Of different slots, as prompts are read, but with ids that are on the device."""
        slots, starts, lens = (ints(column) for column in zip(*pieces, strict=True))
        of_tokens, places = upload_all([slots.repeat(lens), ranges(starts, lens)], self._history.ids.device)
        rows = PrefillRows(*(tuple(column) for column in zip(*pieces, strict=True)))
        ids = self._history.ids[of_tokens, places].to(torch.int64)
        self._model.forward(ids, places, self._backend.prefill(rows))

    def _read_known(self, admission: SlotAdmission) -> None:
        """What the target has from its prefix cache, in which this model's entries may be missing."""
        for begin in range(0, admission.cached_len, CHUNK):
            ids = admission.known_ids[begin : min(begin + CHUNK, admission.cached_len)]
            self._prefill((PrefillChunk(admission.slot, begin, ids, None),))

    def _prefill(self, chunks: Sequence[PrefillChunk]) -> None:
        device = self._history.ids.device
        ids = upload([id for chunk in chunks for id in chunk.token_ids], torch.int64, device)
        places = [chunk.start + i for chunk in chunks for i in range(len(chunk.token_ids))]
        rows = PrefillRows(
            tuple(chunk.slot for chunk in chunks),
            tuple(chunk.start for chunk in chunks),
            tuple(len(chunk.token_ids) for chunk in chunks),
        )
        self._model.forward(ids, upload(places, torch.int64, device), self._backend.prefill(rows))


def chunked(pieces: Sequence[Piece], most: int) -> Iterator[list[Piece]]:
    """The same tokens in order, at most so many at a time: a piece may be cut."""
    chunk: list[Piece] = []
    room = most
    for slot, start, length in pieces:
        end = start + length
        while start < end:
            piece = Piece(slot, start, min(end - start, room))
            chunk.append(piece)
            start, room = start + piece.length, room - piece.length
            if room == 0:
                yield chunk
                chunk, room = [], most
    if chunk:
        yield chunk


def read_rows(
    model: DecoderModel,
    backend: KernelAttention,
    ids: torch.Tensor,  # [R, Q] int64
    slots: torch.Tensor,  # [R] int64
    base: torch.Tensor,  # [R] int64: where each row's first token is stored
) -> torch.Tensor:
    """The model on Q tokens of each row: [R * Q, H]."""
    num_queries = ids.shape[1]
    columns = base[:, None] + torch.arange(num_queries, device=base.device)
    live = None
    if model.has_experts:
        live = (slots != PAD_SLOT)[:, None].expand_as(ids).reshape(-1)
    attention = backend.decode(DecodeRows(slots, base, 0, num_queries))
    return model.forward(ids.reshape(-1), columns.reshape(-1), attention, (), live)[0]

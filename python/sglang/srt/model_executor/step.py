"""The step: forward, choose, accept, update the state, keep the draft cache exact.

There is one path for all modes: *row i put out counts[i] tokens*. A plain step is the verification
of zero drafts, and a prefill is a plain step whose earlier tokens ride along.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from sglang.srt.layers.attention.base import AttentionBackend, Block, DecodeRows, LayerAttention, PrefillRows
from sglang.srt.model_executor.accept import Accepted, TokenRewriter, accept
from sglang.srt.model_executor.drafter import DraftContext, Drafter
from sglang.srt.model_executor.slot_state import SlotState
from sglang.srt.model_executor.step_batch import StepBatch, flatten_chunks, roots
from sglang.srt.model_executor.step_plan import PAD_SLOT, StepPlan
from sglang.srt.sampling.rows import Choice, ChoiceRows
from sglang.srt.sampling.sampler import StepSampler
from sglang.srt.utils.upload import upload


class TargetModel(Protocol):
    """What the step asks of a model."""

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attn: LayerAttention,
        aux_layers: tuple[int, ...] = (),
    ) -> tuple[torch.Tensor, torch.Tensor | None]: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


class KVMover(Protocol):
    """What the step asks of the target's KV pool."""

    def move(self, src_places: torch.Tensor, dst_places: torch.Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class StepOutput:
    """On the device; rows as in the plan."""

    tokens: torch.Tensor  # [R, C] int64
    counts: torch.Tensor  # [R] int64; 0 for the pad slot
    num_valid: torch.Tensor  # [R] int64 tokens before the first choice of logits that were not finite


class StepRunner:
    """Carries out the device part of a plan. Shapes come from the plan and host bounds alone."""

    def __init__(
        self,
        state: SlotState,
        sampler: StepSampler,
        model: TargetModel,
        pool: KVMover,
        backend: AttentionBackend,
        drafter: Drafter | None,
        simulated: TokenRewriter | None = None,
    ) -> None:
        self._simulated = simulated
        self._state = state
        self._sampler = sampler
        self._model = model
        self._pool = pool
        self._backend = backend
        self._drafter = drafter

    def run(self, plan: StepPlan) -> StepOutput:
        """One step of at least one row."""
        batch = self._prefill_batch(plan) if plan.prefill else self._decode_batch(plan)
        aux_layers = self._drafter.aux_layers if self._drafter else ()
        hidden, aux = self._model.forward(batch.token_ids, batch.positions, batch.attention, aux_layers)
        choice = self._choose(batch, hidden)
        if self._simulated is not None:
            tokens, parents = batch.tree.tokens, None if batch.tree.mask is None else batch.tree.parents
            self._simulated.rewrite(tokens, choice.tokens, batch.root_position, batch.slots, parents)
        cap = self._sampler.states.draft_cap[batch.slots]
        num_columns = min(plan.draft_len + 1, batch.num_nodes)
        accepted = accept(batch.tree, choice.tokens, cap, num_columns)
        output = _output(batch, choice, accepted)
        self._count(batch, output)
        if batch.tree.mask is not None:
            self._move_accepted(batch, accepted)
        feature = None
        if self._drafter is not None:
            assert aux is not None
            feature = self._sync(self._drafter, batch, aux, accepted, output)
        last = (output.counts - 1).clamp_(min=0)[:, None]
        next_token = output.tokens.gather(1, last)[:, 0]
        self._state.advance(batch.slots, batch.root_position + output.counts, next_token, feature)
        return output

    def _decode_batch(self, plan: StepPlan) -> StepBatch:
        """Decode rows only, with ``draft_len`` drafts (or a tree of that depth) each."""
        state = self._state
        slots = upload(plan.decode_slots, torch.int64, state.device)
        seq_len, next_token = state.seq_len[slots].to(torch.int64), state.next_token[slots]
        bound = max(plan.decode_len_bounds)
        if plan.draft_len == 0:
            tree = roots(next_token)
        else:
            assert self._drafter is not None, "a speculative step without a drafter"
            sampled = self._sampler.any_sampled(plan.decode_slots)
            feature = state.draft_feature[slots]
            tree = self._drafter.draft(
                DraftContext(slots, seq_len, bound, next_token, feature, sampled), plan.draft_len
            )
        num_rows, num_nodes = tree.tokens.shape
        block = Block.CAUSAL if tree.mask is None else Block.TREE
        rows = DecodeRows(slots, seq_len, bound, num_nodes, block, tree.mask)
        return StepBatch(
            token_ids=tree.tokens.reshape(-1),
            positions=(seq_len[:, None] + tree.depths).reshape(-1),
            attention=self._backend.decode(rows),
            slots_cpu=plan.decode_slots,
            slots=slots,
            root_position=seq_len,
            tree=tree,
            query=torch.arange(num_rows * num_nodes, device=slots.device).view(num_rows, num_nodes),
            num_depths=plan.draft_len + 1,
        )

    def _prefill_batch(self, plan: StepPlan) -> StepBatch:
        """Prefill chunks, with plain decode rows before them in a mixed step."""
        state, chunks = self._state, plan.prefill
        slots_cpu = plan.decode_slots + tuple(c.slot for c in chunks)
        slots = upload(slots_cpu, torch.int64, state.device)
        num_decode = len(plan.decode_slots)
        decode_slots = slots[:num_decode]
        seq_len = state.seq_len[decode_slots].to(torch.int64)
        flat = flatten_chunks(chunks, num_decode, state.device)
        token_ids = torch.cat([state.next_token[decode_slots], flat.token_ids])
        positions = torch.cat([seq_len, flat.positions])
        prefill = PrefillRows(
            tuple(c.slot for c in chunks),
            tuple(c.start for c in chunks),
            tuple(len(c.token_ids) for c in chunks),
        )
        if num_decode:
            decode = DecodeRows(decode_slots, seq_len, max(plan.decode_len_bounds), 1)
            attention = self._backend.mixed(decode, prefill)
        else:
            attention = self._backend.prefill(prefill)
        query = torch.cat([torch.arange(num_decode, device=slots.device), flat.last])
        next_ids = [None] * num_decode + [c.next_id for c in chunks]
        choosing_cpu = tuple(row for row, next_id in enumerate(next_ids) if next_id is None)
        given = None
        if len(choosing_cpu) < len(slots_cpu):
            given = upload([next_id or 0 for next_id in next_ids], torch.int64, state.device)
        return StepBatch(
            token_ids=token_ids,
            positions=positions,
            attention=attention,
            slots_cpu=slots_cpu,
            slots=slots,
            root_position=positions[query],
            tree=roots(token_ids[query]),
            query=query[:, None],
            given=given,
            choosing_cpu=choosing_cpu,
            known=flat.known,
        )

    def _choose(self, batch: StepBatch, hidden: torch.Tensor) -> Choice:
        """The token after every node; lm_head runs only where a token is chosen."""
        rows = _choice_rows(batch)
        if batch.given is None:
            hidden = hidden if batch.known is None else hidden[batch.query.view(-1)]
            return self._sampler.choose(self._model.logits(hidden), rows)
        tokens = batch.given[:, None].clone()
        faulty = torch.zeros_like(tokens, dtype=torch.bool)
        if batch.choosing_cpu:
            picked = upload(batch.choosing_cpu, torch.int64, tokens.device)
            logits = self._model.logits(hidden[batch.query[picked, 0]])
            chosen = self._sampler.choose(logits, rows.take(batch.choosing_cpu))
            tokens[picked], faulty[picked] = chosen.tokens, chosen.faulty
        return Choice(tokens, faulty)

    def _count(self, batch: StepBatch, output: StepOutput) -> None:
        """Penalties take note of what was chosen; ids that were given are known to them already."""
        rows = _choice_rows(batch)
        if batch.given is None:
            self._sampler.count(rows, output.tokens, output.counts)
        elif batch.choosing_cpu:
            picked = upload(batch.choosing_cpu, torch.int64, output.tokens.device)
            chosen = rows.take(batch.choosing_cpu)
            self._sampler.count(chosen, output.tokens[picked], output.counts[picked])

    def _move_accepted(self, batch: StepBatch, accepted: Accepted) -> None:
        """Tree nodes were stored in node order: bring the accepted path to the front."""
        root = batch.root_position[:, None]
        column = torch.arange(accepted.path.shape[1], device=root.device)
        slots = batch.slots[:, None].expand_as(accepted.path)
        # Past the count the path is the column itself: those places are copied onto themselves.
        src = self._backend.places(slots, root + accepted.path)
        dst = self._backend.places(slots, (root + column).expand_as(accepted.path))
        self._pool.move(src[:, 1:].reshape(-1), dst[:, 1:].reshape(-1))

    def _sync(
        self, drafter: Drafter, batch: StepBatch, aux: torch.Tensor, accepted: Accepted, output: StepOutput
    ) -> torch.Tensor:
        """Write the draft KV of every committed position; returns [R, H_draft], the last features.

        Columns past a row's count write beyond its new length, where nothing is read before it is
        written again.
        """
        num_rows, num_columns = accepted.path.shape
        column = torch.arange(num_columns, device=aux.device)
        query = batch.query.gather(1, accepted.path).reshape(-1)
        next_ids = output.tokens.reshape(-1)
        slots = batch.slots[:, None].expand(-1, num_columns).reshape(-1)
        positions = (batch.root_position[:, None] + column).reshape(-1)
        known = batch.known
        if known is not None:
            query = torch.cat([query, known.query])
            next_ids = torch.cat([next_ids, known.next_ids])
            slots = torch.cat([slots, known.slots])
            positions = torch.cat([positions, known.positions])
        features = drafter.feature(aux[query])
        drafter.sync(next_ids, features, slots, positions)
        of_rows = features[: num_rows * num_columns].view(num_rows, num_columns, -1)
        last = (output.counts - 1).clamp_(min=0)
        return of_rows[torch.arange(num_rows, device=aux.device), last]


def _choice_rows(batch: StepBatch) -> ChoiceRows:
    tree = batch.tree
    return ChoiceRows(
        slots_cpu=batch.slots_cpu,
        slots=batch.slots,
        root_index=batch.root_position,
        tokens=tree.tokens,
        depths=tree.depths,
        mask=tree.mask,
        num_depths=batch.num_depths,
    )


def _output(batch: StepBatch, choice: Choice, accepted: Accepted) -> StepOutput:
    """The accepted choices. Rows of the pad slot put out nothing."""
    counts = torch.where(batch.slots == PAD_SLOT, 0, accepted.counts)
    column = torch.arange(accepted.path.shape[1], device=counts.device)
    valid = (column < counts[:, None]) & ~choice.faulty.gather(1, accepted.path)
    num_valid = valid.to(torch.int64).cumprod(dim=1).sum(dim=1)
    return StepOutput(choice.tokens.gather(1, accepted.path), counts, num_valid)

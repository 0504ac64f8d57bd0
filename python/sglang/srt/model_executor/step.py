"""The step: forward, choose, accept, update the state, keep the draft cache exact.

There is one path for all modes: *row i put out counts[i] tokens*. A plain step is the verification
of zero drafts, and a prefill is a plain step whose earlier tokens ride along.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from sglang.srt.layers.attention.base import AttentionBackend, Block, DecodeRows, LayerAttention, PrefillRows
from sglang.srt.model_executor.accept import Accepted, TokenRewriter, accept
from sglang.srt.model_executor.drafter import DraftContext, Drafter
from sglang.srt.model_executor.slot_state import SlotState
from sglang.srt.model_executor.step_batch import Pairs, StepBatch, prefill_inputs, roots
from sglang.srt.model_executor.step_plan import PAD_SLOT, StepPlan
from sglang.srt.model_executor.step_trace import StepTrace
from sglang.srt.sampling.rows import Choice, ChoiceMasks, ChoiceRows
from sglang.srt.sampling.sampler import StepSampler
from sglang.srt.utils.upload import upload

LogitEdit = Callable[[torch.Tensor, Mapping[int, int]], None]
"""Changes logits [T, V] in place; the first line of each row whose tokens are chosen."""


class TargetModel(Protocol):
    """What the step asks of a model."""

    @property
    def has_experts(self) -> bool: ...

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attn: LayerAttention,
        aux_layers: tuple[int, ...] = (),
        live: torch.Tensor | None = None,  # [T] bool: not padding; None: all
    ) -> tuple[torch.Tensor, torch.Tensor | None]: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...

    def last_norm(self, hidden: torch.Tensor) -> torch.Tensor: ...


class KVMover(Protocol):
    """What the step asks of the target's KV pool."""

    def move(self, src_places: torch.Tensor, dst_places: torch.Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class StepOutput:
    """On the device; rows as in the plan."""

    tokens: torch.Tensor  # [R, C] int64
    counts: torch.Tensor  # [R] int64; 0 for the pad slot
    num_valid: torch.Tensor  # [R] int64 tokens before the first choice of logits that were not finite
    trace: StepTrace | None = None  # of a step with wishes


@dataclass(frozen=True, slots=True)
class Forward:
    """The first half of a step, launched."""

    batch: StepBatch
    hidden: torch.Tensor  # [T, H]
    aux: torch.Tensor | None  # [T, num_aux * H], with a drafter that reads some


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
        self.simulated = simulated  # the decode step on a GPU has the same one
        self._state = state
        self._sampler = sampler
        self.model = model
        self._pool = pool
        self._backend = backend
        self._drafter = drafter

    def run(self, plan: StepPlan) -> StepOutput:
        """One step of at least one row."""
        return self.finish(plan, self.forward(plan))

    def forward(self, plan: StepPlan) -> Forward:
        """The target on the plan's tokens. Reads nothing that ``finish`` or a slot's sampling changes."""
        batch = self._prefill_batch(plan) if plan.prefill else self._decode_batch(plan)
        aux_layers = self._drafter.aux_layers if self._drafter else ()
        hidden, aux = self.model.forward(batch.token_ids, batch.positions, batch.attention, aux_layers)
        return Forward(batch, hidden, aux)

    def finish(
        self,
        plan: StepPlan,
        forward: Forward,
        masks: ChoiceMasks | None = None,
        edit: LogitEdit | None = None,
    ) -> StepOutput:
        """Choose (of what ``masks`` allow, and as ``edit`` wants), accept, and leave the state as the next
        step finds it.
        """
        batch, hidden, aux = forward.batch, forward.hidden, forward.aux
        choice, logits = self._choose(batch, hidden, masks, edit)
        if self.simulated is not None:
            tokens, parents = batch.tree.tokens, None if batch.tree.mask is None else batch.tree.parents
            self.simulated.rewrite(tokens, choice.tokens, batch.root_position, batch.slots, parents)
        cap = self._caps(plan, batch.slots)
        num_columns = min(plan.draft_len + 1, batch.num_nodes)
        accepted = accept(batch.tree, choice.tokens, cap, num_columns)
        output = _output(batch, choice, accepted)
        self._count(batch, output)
        if batch.tree.mask is not None:
            self._move_accepted(batch, accepted)
        feature = None
        if self._drafter is not None:
            aux = hidden[:, :0] if aux is None else aux  # of a drafter that reads no hidden states
            feature = self._sync(self._drafter, batch, aux, accepted, output)
        next_token = output.tokens[:, 0]
        if output.tokens.shape[1] > 1:
            last = (output.counts - 1).clamp_(min=0)[:, None]
            next_token = output.tokens.gather(1, last)[:, 0]
        self._state.advance(batch.slots, batch.root_position + output.counts, next_token, feature)
        if not plan.wishes:
            return output
        return replace(output, trace=_trace(batch, output.tokens, accepted.path, logits, hidden))

    def _caps(self, plan: StepPlan, slots: torch.Tensor) -> torch.Tensor:
        """[R] int64: most drafts that each row takes. Here all are verified, whatever the plan leaves out."""
        caps = self._sampler.states.draft_cap[slots]
        if not plan.row_drafts:
            return caps
        return torch.minimum(caps, upload(plan.row_drafts, torch.int64, self._state.device))

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
        state, chunks, num_decode = self._state, plan.prefill, len(plan.decode_slots)
        known = prefill_inputs(plan, state.device, with_pairs=self._drafter is not None)
        prefill = PrefillRows(
            tuple(c.slot for c in chunks),
            tuple(c.start for c in chunks),
            tuple(len(c.token_ids) for c in chunks),
        )
        token_ids, positions = known.token_ids, known.positions
        root_ids, root_positions = known.root_ids, known.root_positions
        if num_decode:
            slots = known.slots[:num_decode]
            seq_len, next_token = state.seq_len[slots].to(torch.int64), state.next_token[slots]
            token_ids, root_ids = (torch.cat([next_token, of_chunks]) for of_chunks in (token_ids, root_ids))
            positions = torch.cat([seq_len, positions])
            root_positions = torch.cat([seq_len, root_positions])
            decode = DecodeRows(slots, seq_len, max(plan.decode_len_bounds), 1)
            attention = self._backend.mixed(decode, prefill)
        else:
            attention = self._backend.prefill(prefill)
        return StepBatch(
            token_ids=token_ids,
            positions=positions,
            attention=attention,
            slots_cpu=known.slots_cpu,
            slots=known.slots,
            root_position=root_positions,
            tree=roots(root_ids),
            query=known.query[:, None],
            given=known.given,
            choosing_cpu=known.choosing_cpu,
            choosing=known.choosing,
            is_prefill=True,
            pairs=known.pairs,
        )

    def _choose(
        self, batch: StepBatch, hidden: torch.Tensor, masks: ChoiceMasks | None, edit: LogitEdit | None
    ) -> tuple[Choice, torch.Tensor | None]:
        """The token after every node, and the logits that it was chosen from; lm_head runs only where a token
        is chosen."""
        rows, logits = _choice_rows(batch), None
        if batch.given is None:
            hidden = hidden[batch.query.view(-1)] if batch.is_prefill else hidden
            logits = self.model.logits(hidden)
            if edit is not None:
                edit(logits, {row: row * rows.num_nodes for row in range(len(rows.slots_cpu))})
            return self._sampler.choose(logits, rows, masks), logits
        tokens = batch.given[:, None].clone()
        faulty = torch.zeros_like(tokens, dtype=torch.bool)
        if batch.choosing_cpu:
            picked = batch.choosing
            assert picked is not None
            logits = self.model.logits(hidden[batch.query[picked, 0]])
            if edit is not None:
                edit(logits, {row: line for line, row in enumerate(batch.choosing_cpu)})
            masks = None if masks is None else masks.take(batch.choosing_cpu)
            chosen = self._sampler.choose(logits, rows.take(batch.choosing_cpu), masks)
            tokens[picked], faulty[picked] = chosen.tokens, chosen.faulty
        return Choice(tokens, faulty), logits

    def _count(self, batch: StepBatch, output: StepOutput) -> None:
        """Penalties take note of what was chosen; ids that were given are known to them already."""
        rows = _choice_rows(batch)
        if batch.given is None:
            self._sampler.count(rows, output.tokens, output.counts)
        elif batch.choosing_cpu:
            picked = batch.choosing
            assert picked is not None
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
        if batch.pairs is not None:
            return _sync_prompts(drafter, batch, batch.pairs, aux, output)
        num_rows, num_columns = accepted.path.shape
        column = torch.arange(num_columns, device=aux.device)
        query = batch.query.gather(1, accepted.path).reshape(-1)
        slots = batch.slots[:, None].expand(-1, num_columns).reshape(-1)
        positions = (batch.root_position[:, None] + column).reshape(-1)
        features = drafter.feature(aux[query])
        drafter.sync(output.tokens.reshape(-1), features, slots, positions)
        of_rows = features.view(num_rows, num_columns, -1)
        last = (output.counts - 1).clamp_(min=0)
        return of_rows[torch.arange(num_rows, device=aux.device), last]


def _sync_prompts(
    drafter: Drafter, batch: StepBatch, pairs: Pairs, aux: torch.Tensor, output: StepOutput
) -> torch.Tensor:
    """All tokens of a prefill step, in their own order: [R, H_draft] features of the roots."""
    query = batch.query.view(-1)
    pairs.next_ids.index_copy_(0, query, output.tokens[:, 0])
    features = drafter.feature(aux)
    drafter.sync(pairs.next_ids, features, pairs.slots, batch.positions)
    return features[query]


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
    counts = accepted.counts * (batch.slots != PAD_SLOT)
    if batch.num_nodes == 1:
        return StepOutput(choice.tokens, counts, counts * ~choice.faulty[:, 0])
    column = torch.arange(accepted.path.shape[1], device=counts.device)
    valid = (column < counts[:, None]) & ~choice.faulty.gather(1, accepted.path)
    num_valid = valid.to(torch.int64).cumprod(dim=1).sum(dim=1)
    return StepOutput(choice.tokens.gather(1, accepted.path), counts, num_valid)


def _trace(
    batch: StepBatch,
    tokens: torch.Tensor,
    path: torch.Tensor,
    logits: torch.Tensor | None,
    hidden: torch.Tensor,
) -> StepTrace:
    if not batch.is_prefill:
        return StepTrace(logits, hidden, tokens, path, batch.num_nodes)
    line_of = None
    if batch.given is not None:  # rows that choose nothing have no line
        line_of = torch.zeros_like(batch.query)
        assert batch.choosing is not None
        line_of[batch.choosing, 0] = torch.arange(len(batch.choosing_cpu), device=line_of.device)
    return StepTrace(logits, hidden, tokens, path, 1, line_of, place_of=batch.query)

"""Choosing tokens with sgl_kernel's ops: what ``Sampler`` chooses, with nothing decided on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from sgl_kernel.sampling.choose import ChoiceBuffers, choose
from sgl_kernel.sampling.filters.ops import filter_cutoffs
from sgl_kernel.sampling.masks.ops import apply_masks
from sgl_kernel.sampling.rows import Depths, NodeRows
from sgl_kernel.sampling.rules.ops import apply_rules, count_outputs
from sglang.srt.model_executor.step_plan import SlotAdmission
from sglang.srt.sampling.kernel_rules import KernelRules
from sglang.srt.sampling.rows import Choice, ChoiceMasks, ChoiceRows
from sglang.srt.sampling.states import SamplingStates
from sglang.srt.utils.upload import upload

_SCRATCH_LINES = 256


@dataclass(frozen=True, slots=True)
class NodeMasks:
    """Ids that rows may choose, as a kernel reads them."""

    which: torch.Tensor  # [R] int32: the row's place in ``bits``; below 0: it may choose any
    bits: torch.Tensor  # [G, N, words] int32

    @staticmethod
    def of(masks: ChoiceMasks, num_rows: int) -> NodeMasks:
        which = [-1] * num_rows
        for place, row in enumerate(masks.rows_cpu):
            which[row] = place
        return NodeMasks(upload(which, torch.int32, masks.bits.device), masks.bits)


class KernelSampler:
    """Rules, then filters, then the argmax, with noise where T > 0: the same launches for every batch.

    What a row asks for is read from its slot's state on the device, so a CUDA graph that holds these
    launches is right for every mix of rows; a line that asks for nothing returns from a launch at once.
    One stream at a time may use it: the filters' scratch is shared by all calls.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device, *, pdl: bool = False) -> None:
        """``num_rows`` counts the pad slot's row too. Call ``reserve`` before the first choice."""
        self.states = SamplingStates(num_rows, vocab_size, device)
        self.rules = KernelRules(num_rows, vocab_size, device)
        self._scratch = torch.empty(0, vocab_size, dtype=torch.float32, device=device)  # [lines, V]
        self._pdl = pdl

    @property
    def bytes(self) -> int:
        """Memory held, what was reserved included."""
        return self.states.bytes + self.rules.bytes + self._scratch.nbytes

    def reserve(self, max_lines: int) -> None:
        """Scratch for steps of up to ``max_lines`` rows of logits; once, before graphs hold its address.

        More than a few lines are filtered in parts, so that it does not grow with the batch. A step of
        more lines is served too, if one row's nodes fit.
        """
        assert len(self._scratch) == 0, "a graph may hold the address of what was reserved before"
        self._scratch = self._scratch.new_empty(min(max_lines, _SCRATCH_LINES), self._scratch.shape[1])

    def admit(self, admissions: Sequence[SlotAdmission]) -> None:
        """Slots begin a new life: everything kept for them is set anew."""
        if admissions:
            self.states.admit(admissions)
            self.rules.admit(admissions)

    def any_sampled(self, slots_cpu: Sequence[int]) -> bool:
        """Whether noise takes part in the choice of some row (asked on the host)."""
        return any(self.states.is_sampled(slot) for slot in slots_cpu)

    def choose(self, logits: torch.Tensor, rows: ChoiceRows, masks: ChoiceMasks | None = None) -> Choice:
        """``choose_nodes`` as ``Sampler.choose`` is called. logits: [R * N, V] float32, changed in
        place by rules and masks, by nothing else."""
        kind, depths = Depths.CHAIN, None
        if rows.mask is not None:
            kind, depths = Depths.TREE, rows.depths.contiguous()
        nodes = NodeRows(rows.slots, rows.root_index, rows.num_nodes, kind, depths)
        mask = None if rows.mask is None else rows.mask.contiguous()
        allowed = None if masks is None else NodeMasks.of(masks, len(rows.slots_cpu))
        return Choice(*self.choose_nodes(logits, nodes, rows.tokens.contiguous(), mask, allowed))

    def count(self, rows: ChoiceRows, tokens: torch.Tensor, num_tokens: torch.Tensor) -> None:
        """Take note of what rows put out. tokens: [R, C] int64; num_tokens: [R] int64."""
        self.count_rows(rows.slots, tokens, num_tokens)

    def choose_nodes(
        self,
        logits: torch.Tensor,
        rows: NodeRows,
        tokens: torch.Tensor,
        mask: torch.Tensor | None = None,
        allowed: NodeMasks | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The token that follows each node, and whether its logits were broken: [R, N] int64, bool.

        logits: [R * N, V] float32, changed in place; tokens: [R, N] int64, the nodes' own tokens; mask:
        [R, N, N] bool ancestor-or-self of a tree. Equal scores: the lowest id wins. A node whose logits
        are not finite is faulty and gets token 0. The results are new tensors: nothing overwrites them.
        Rows with ``lines`` have logits [T, V] and results [T].
        """
        apply_rules(logits, rows, tokens, self.rules.states, mask=mask, pdl=self._pdl)
        if allowed is not None:
            apply_masks(logits, rows, allowed.which, allowed.bits, pdl=self._pdl)
        cutoffs = self._cutoffs(logits, rows)
        buffers = ChoiceBuffers.make(logits.shape[0], logits.shape[1], logits.device)
        heat, seed = self.states.temperature, self.states.seed
        return choose(logits, rows, heat, seed, buffers, cutoffs=cutoffs, pdl=self._pdl)

    def guess(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        root: torch.Tensor,
        offset: int,
        token_ids: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """A drafter's choice of the tokens with index ``root + offset``, as target ids, into ``out``.

        logits: [R, V'] float32, only read; slots, root: [R]; token_ids: [V'] int64, target's ids; out:
        [R] int64, may be a column of a wider tensor. Noise is drawn at the target's ids, as the
        target's own choice will draw it. Equal scores: the lowest column wins.
        """
        rows = NodeRows(slots, root, 1, Depths.SHARED, offset=offset)
        num_rows, vocab_size = logits.shape
        buffers = replace(ChoiceBuffers.make(num_rows, vocab_size, logits.device), tokens=out)
        heat, seed = self.states.temperature, self.states.seed
        choose(logits, rows, heat, seed, buffers, token_ids=token_ids, faults=False, pdl=self._pdl)

    def count_rows(self, slots: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor) -> None:
        """Penalties take note of what was put out.

        slots: [R]; tokens: [R, C] int64, columns adjacent; counts: [R], how many of a row's were put out.
        """
        count_outputs(self.rules.states, slots, tokens, counts, pdl=self._pdl)

    def _cutoffs(self, logits: torch.Tensor, rows: NodeRows) -> torch.Tensor:
        """[R * N] float32: the lowest score that the filters let stay. Whole rows at a time."""
        nodes, num_rows = rows.num_nodes, rows.slots.shape[0]
        if rows.lines is not None:
            nodes, num_rows = 1, rows.num_lines
        at_once = len(self._scratch) // nodes
        assert at_once, f"scratch for {len(self._scratch)} lines (see reserve), a row has {nodes}"
        if at_once >= 4:
            at_once -= at_once % 4  # parts begin at multiples of 16 bytes: one variant of the kernel
        cutoffs = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
        s = self.states
        for first in range(0, num_rows, at_once):
            part = slice(first, first + at_once)
            lines = slice(first * nodes, (first + at_once) * nodes)
            some = logits[lines]
            scratch, result = self._scratch[: len(some)], cutoffs[lines]
            filter_cutoffs(
                some, _part(rows, part), s.temperature, s.top_k, s.top_p, s.min_p, scratch, result,
                pdl=self._pdl,
            )  # fmt: skip
        return cutoffs


def _part(rows: NodeRows, part: slice) -> NodeRows:
    """Some rows; of those with ``lines`` some lines."""
    if rows.lines is not None:
        return replace(rows, lines=rows.lines[part])
    depths = None if rows.depths is None else rows.depths[part]
    return replace(rows, slots=rows.slots[part], root=rows.root[part], depths=depths)

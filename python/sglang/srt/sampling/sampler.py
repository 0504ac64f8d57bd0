"""Choose a token for every node of every row. The mode of the step does not enter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from sglang.srt.model_executor.step_plan import SlotAdmission
from sglang.srt.sampling.penalties import PenaltiesState
from sglang.srt.sampling.rows import Choice, ChoiceMasks, ChoiceRows
from sglang.srt.sampling.states import SamplingStates
from sglang.srt.sampling.token_rules import LogitBiasState, MinNewTokensState
from sglang.srt.utils.upload import upload


class StepSampler(Protocol):
    """What a step asks of a sampler."""

    @property
    def states(self) -> SamplingStates: ...

    def admit(self, admissions: Sequence[SlotAdmission]) -> None: ...

    def any_sampled(self, slots_cpu: Sequence[int]) -> bool: ...

    def choose(self, logits: torch.Tensor, rows: ChoiceRows, masks: ChoiceMasks | None = None) -> Choice: ...

    def count(self, rows: ChoiceRows, tokens: torch.Tensor, num_tokens: torch.Tensor) -> None: ...


class Sampler:
    """Penalties, biases and suppression per row; then argmax, with noise where T > 0."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """``num_rows`` counts the pad slot's row too."""
        self.states = SamplingStates(num_rows, vocab_size, device)
        self.penalties = PenaltiesState(num_rows, vocab_size, device)
        self._rules = (
            self.penalties,
            LogitBiasState(num_rows, vocab_size, device),
            MinNewTokensState(num_rows, vocab_size, device),
        )

    def admit(self, admissions: Sequence[SlotAdmission]) -> None:
        """Slots begin a new life: everything kept for them is set anew."""
        if not admissions:
            return
        self.states.admit(admissions)
        for rule in self._rules:
            rule.admit(admissions)

    def any_sampled(self, slots_cpu: Sequence[int]) -> bool:
        """Whether noise takes part in the choice of some row (asked on the host)."""
        return any(self.states.is_sampled(slot) for slot in slots_cpu)

    def choose(self, logits: torch.Tensor, rows: ChoiceRows, masks: ChoiceMasks | None = None) -> Choice:
        """The token that follows each node, of those that ``masks`` allow.

        logits: [R * N, V] float32 or float64, changed in place by rules and masks, by nothing else. Equal
        scores: the lowest id wins. A node whose logits are not finite is faulty and gets token 0.
        """
        # Any NaN or infinity makes the sum so, and a sum costs one pass.
        faulty = ~logits.sum(dim=-1).isfinite().view_as(rows.tokens)
        nodes = logits.view(*rows.tokens.shape, -1)
        if masks is not None:
            masked = upload(masks.rows_cpu, torch.int64, nodes.device)
            nodes[masked] = nodes[masked].masked_fill_(~masks.allowed(nodes.shape[-1]), -torch.inf)
        for rule in self._rules:
            picked = rows.pick(rule.needs)
            if picked is not None:
                picked.put(nodes, rule.apply(picked.of(nodes), picked.rows))
        tokens = nodes.argmax(dim=-1)
        picked = rows.pick(self.states.is_sampled)
        if picked is not None:
            picked.put(tokens, self.states.scores(picked.of(nodes), picked.rows).argmax(dim=-1))
        return Choice(tokens.masked_fill_(faulty, 0), faulty)

    def count(self, rows: ChoiceRows, tokens: torch.Tensor, num_tokens: torch.Tensor) -> None:
        """Take note of what rows put out. tokens: [R, C] int64; num_tokens: [R] int64."""
        picked = rows.pick(self.penalties.needs)
        if picked is not None:
            self.penalties.count(picked, picked.of(tokens), picked.of(num_tokens))

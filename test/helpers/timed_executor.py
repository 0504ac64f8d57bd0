"""An executor that computes nothing: steps take the time of a cost table on a clock of its own, and drafts
are accepted with given probabilities.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from sglang.srt.model_executor.step_plan import ExecutorInfo, SpecShape, StepCost, StepPlan, StepResult
from sglang.srt.speculative.cost_table import CostTable

PREFILL_S = 2e-3
PREFILL_TOKEN_S = 23e-6


class TimedPending:
    def __init__(self, executor: TimedExecutor, plan: StepPlan) -> None:
        self._executor = executor
        self.plan = plan

    def wait(self) -> StepResult:
        return self._executor.finish(self.plan)


class TimedExecutor:
    """``now`` moves when a step is waited for: the host takes no time, the device is never idle."""

    def __init__(
        self,
        costs: Sequence[StepCost],
        survival: Callable[[], Sequence[float]],  # P(draft j is accepted), j = 1 … num_steps
        num_slots: int,
        num_pages: int,
        context_len: int,
        noise: float = 0.0,  # of a step's time
        told: Sequence[StepCost] = (),  # what the scheduler hears of the costs; (): the truth
    ) -> None:
        num_steps = max(cost.draft_len for cost in costs)
        self.now = 0.0
        self._table = CostTable.from_costs(costs, padded=False)
        self._survival = survival
        self._rng = random.Random(0)
        self._noise = noise
        self._lens: dict[int, int] = {}  # slot -> KV tokens
        self._info = ExecutorInfo(
            num_slots=num_slots, num_pages=num_pages, page_size=1, context_len=context_len, vocab_size=256,
            spec=SpecShape(num_steps), max_spec_rows=num_slots, costs=tuple(told or costs),
            draft_lens=tuple(range(1, num_steps + 1)),
        )  # fmt: skip

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    def launch(self, plan: StepPlan) -> TimedPending:
        return TimedPending(self, plan)

    def shutdown(self) -> None: ...

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def finish(self, plan: StepPlan) -> StepResult:
        num_prefilled = sum(len(chunk.token_ids) for chunk in plan.prefill)
        seconds = PREFILL_S * bool(plan.prefill) + PREFILL_TOKEN_S * num_prefilled
        if plan.decode_slots:
            kv_tokens = sum(self._lens[slot] for slot in plan.decode_slots)
            seconds += self._table.seconds(plan.draft_len, len(plan.decode_slots), kv_tokens)
        seconds *= max(0.5, self._rng.gauss(1.0, self._noise))
        self.now += seconds
        tokens = [self._decode(slot, plan.draft_len) for slot in plan.decode_slots]
        for chunk in plan.prefill:
            self._lens[chunk.slot] = chunk.start + len(chunk.token_ids)
            tokens.append((7,) if chunk.is_last else ())
        return StepResult(plan.step_id, tuple(tokens), (False,) * len(tokens), seconds)

    def _decode(self, slot: int, draft_len: int) -> tuple[int, ...]:
        draw = self._rng.random()
        tokens = (7,) * (1 + sum(draw < part for part in self._survival()[:draft_len]))
        self._lens[slot] += len(tokens)
        return tokens


def h200_costs() -> list[StepCost]:
    """About those of Llama-8B's shape on an H200 (docs/h200.md), at a context of 1,100 tokens."""
    rows = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    plain = (4.03, 4.25, 4.35, 4.55, 4.91, 5.70, 6.94, 9.66, 16.12)
    spec = (4.96, 5.03, 5.18, 5.60, 6.18, 7.25, 10.71, 18.66, 36.0)
    per_token = 131072 / 4.2e12
    return [
        StepCost(k, n, (a + (b - a) * k / 3) * 1e-3 - n * 1100 * per_token, per_token)
        for k in range(4)
        for n, a, b in zip(rows, plain, spec, strict=True)
    ]

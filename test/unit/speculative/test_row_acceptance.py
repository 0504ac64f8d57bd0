"""What is learned of each request, and what ``auto`` makes of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.model_executor.step_plan import RaggedSize, StepCost
from sglang.srt.speculative.allocation import Sharing
from sglang.srt.speculative.auto import RAGGED_MARGIN, AutoInput, Beliefs, choose, decide_auto
from sglang.srt.speculative.controller import AutoController, ClassTally, CommittedStep
from sglang.srt.speculative.cost_table import CostTable
from sglang.srt.speculative.row_acceptance import DUE_SHARE, UNTRIED_STEPS, Outcomes, RowAcceptance
from sglang.srt.speculative.toggle import Decision, Reason

CLASS = (0.6, 0.5, 0.4)
LITTLE = 1 + 0.5 * RAGGED_MARGIN


@dataclass(frozen=True, slots=True)
class Row:
    slot: int
    arrival: int
    draft_class: str = "greedy"
    draft_cap: int | None = None


def parts(name: str) -> Sequence[float]:
    return CLASS


def rows_of(count: int) -> list[Row]:
    return [Row(slot, 100 + slot) for slot in range(1, count + 1)]


def told(rows: Sequence[Row], drafts: Sequence[int], correct: Sequence[int]) -> Outcomes:
    return Outcomes(list(rows), list(drafts), list(correct))


def reached(acceptance: RowAcceptance, rows: Sequence[Row]) -> np.ndarray:
    """[R] chance of a first draft. Of the rows alone, so that the order tells nothing."""
    return np.array([acceptance.sharing([row], parts).extra_tokens()[1] for row in rows])


def test_a_new_request_is_what_its_class_is() -> None:
    acceptance = RowAcceptance(4, 3)
    sharing = acceptance.sharing(rows_of(4), parts)
    deeper = (CLASS[1] + CLASS[2]) / 2
    per_row = [0.0, CLASS[0], CLASS[0] * deeper, CLASS[0] * deeper**2]
    assert sharing.extra_tokens() == pytest.approx([4 * sum(per_row[: k + 1]) for k in range(4)])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=30))
def test_what_a_request_showed_moves_it_that_way(steps: list[tuple[int, int]]) -> None:
    acceptance, (row,) = RowAcceptance(1, 3), rows_of(1)
    for drafts, wanted in steps:
        correct = min(drafts, wanted)
        before = reached(acceptance, [row])[0]
        acceptance.step()
        faded = reached(acceptance, [row])[0]  # towards the class
        assert min(before, CLASS[0]) - 1e-9 <= faded <= max(before, CLASS[0]) + 1e-9
        acceptance.observe(told([row], [drafts], [correct]))
        now = reached(acceptance, [row])[0]
        assert 0.0 < now < 1.0
        assert now == pytest.approx(faded) if not drafts else (now > faded) == (correct > 0)


def test_two_requests_are_told_apart_and_their_slots_forget() -> None:
    acceptance, rows = RowAcceptance(2, 3), rows_of(2)
    for _ in range(40):
        acceptance.step()
        acceptance.observe(told(rows, [3, 3], [3, 0]))
    high, low = reached(acceptance, rows)
    assert high > 0.9 and low < 0.1
    sharing = acceptance.sharing(rows, parts)
    assert sharing.drafts(3, 3) == (3, 0)
    assert reached(acceptance, [Row(1, 999), rows[1]]) == pytest.approx([CLASS[0], low])


def test_a_cap_is_kept() -> None:
    acceptance = RowAcceptance(3, 3)
    rows = [Row(1, 1, "", 0), Row(2, 2, "greedy, at most 1", 1), Row(3, 3)]
    sharing = acceptance.sharing(rows, parts)
    assert sharing.drafts(3, 4) == (0, 1, 3)
    assert sharing.extra_tokens()[3] == pytest.approx(CLASS[0] + sum(CLASS[0] * 0.45**d for d in range(3)))


def test_a_request_without_drafts_is_tried_again() -> None:
    acceptance, rows = RowAcceptance(64, 3), rows_of(64)
    correct = [3] * 32 + [0] * 32
    for _ in range(60):
        acceptance.step()
        acceptance.observe(told(rows, [3] * 64, correct))
    tried: dict[int, int] = dict.fromkeys(range(32, 64), 0)
    for _ in range(4 * UNTRIED_STEPS):
        drafts = acceptance.sharing(rows, parts).drafts(3, 64)
        assert sum(k > 0 for k in drafts[32:]) <= 64 // DUE_SHARE
        for index in tried:
            tried[index] += drafts[index] > 0
        acceptance.step()
        acceptance.observe(told(rows, drafts, [min(k, m) for k, m in zip(drafts, correct, strict=True)]))
    assert min(tried.values()) >= 3, "every one of them, each UNTRIED_STEPS steps"


# ---- what auto makes of it -----------------------------------------------------------------------

SIZES = (RaggedSize(1, 8, 12), RaggedSize(3, 8, 16), RaggedSize(3, 8, 20))
STATE = AutoInput(8, (("greedy", 8.0),), 8000, 3, (1, 2, 3), (1, 2, 3), SIZES)
HALF = np.array([[0.9, 0.8, 0.7]] * 4 + [[0.1, 0.01, 0.0]] * 4)  # [8, 3]


@dataclass(frozen=True, slots=True)
class Costs:
    common: dict[int, float]
    ragged: dict[RaggedSize, float]

    def both_seconds(self, draft_len: int, rows: int, kv_tokens: float) -> tuple[float, float]:
        return self.common[draft_len], self.common[draft_len]

    def ragged_seconds(self, size: RaggedSize, kv_tokens: float) -> float:
        return self.ragged.get(size, float("inf"))


class Class:
    """Never asked where rows are told apart, but for what is hoped of a probe."""

    def extra_tokens(self, counts: object, longest: int) -> list[float]:
        raise AssertionError("the rows say it")

    def most_extra_tokens(self, counts: object, longest: int) -> list[float]:
        return [8.0 * k for k in range(longest + 1)]


COMMON = {0: 1.0, 1: 1.2, 2: 1.4, 3: 1.6}  # 8, 12 / 1.2, 15.24 / 1.4, 18.04 / 1.6
BEST = (8 + HALF.sum()) / 1.6  # with 3 drafts for all


@pytest.mark.parametrize(
    ("ragged", "change", "size"),
    [
        ({}, {}, None),  # not measured
        ({SIZES[2]: 1.4}, {}, SIZES[2]),
        ({SIZES[2]: 1.4}, {"fitting_lens": (1, 2)}, None),  # the pages of 3 drafts aren't there
        ({SIZES[2]: 1.4}, {"ragged_sizes": SIZES[:2]}, None),  # not captured
        ({SIZES[1]: 1.0, SIZES[2]: 1.4}, {}, SIZES[1]),
        ({SIZES[0]: 0.5}, {}, SIZES[0]),
        ({SIZES[2]: 17.6 / BEST / (1 + 0.5 * RAGGED_MARGIN)}, {}, None),  # better, but not by enough
        ({SIZES[2]: 17.6 / BEST / (1 + 1.5 * RAGGED_MARGIN)}, {}, SIZES[2]),
    ],
)
def test_decisions(
    ragged: dict[RaggedSize, float], change: dict[str, object], size: RaggedSize | None
) -> None:
    state = replace(STATE, **change)  # type: ignore[arg-type]
    sharing = Sharing(HALF)
    decision = decide_auto(state, Beliefs(Costs(COMMON, ragged), Class(), 0.0, sharing))
    assert (decision.size, decision.reason) == (size, Reason.COST)
    if size is None:
        assert decision.row_drafts == ()
    else:
        assert decision.draft_len == size.draft_len
        assert decision.row_drafts == sharing.drafts(size.draft_len, size.tokens - size.rows)


def test_more_tokens_than_the_rows_can_take_are_no_choice() -> None:
    state = replace(STATE, num_decoding=3, class_counts=(("greedy", 3.0),))
    beliefs = Beliefs(Costs(COMMON, {SIZES[2]: 0.1}), Class(), 0.0, Sharing(HALF[:3]))
    assert decide_auto(state, beliefs).size is None


def test_a_common_length_may_be_probed() -> None:
    beliefs = Beliefs(Costs(COMMON, {SIZES[2]: 1.4}), Class(), 0.3, Sharing(HALF))
    choice = choose(STATE, beliefs)
    assert choice.decision == Decision(3, Reason.PROBE), "all rows would accept 3, if all were as hoped"
    assert choice.charge_s == pytest.approx(0.2), "what it takes longer: its drafts are all that and more"
    assert choose(STATE, replace(beliefs, probe_credit_s=0.1)).decision.size == SIZES[2]


def test_a_length_of_their_own_is_probed_from_plain_decoding() -> None:
    """If it could win by more than the margin, and the credit pays for it with nothing accepted."""
    unknown = Sharing(np.full((8, 3), 0.2))
    common = COMMON | {1: 9.0, 2: 9.0, 3: 9.0}
    beliefs = Beliefs(Costs(common, {SIZES[1]: 1.4}), Class(), 0.0, unknown)
    hopeful = replace(beliefs, row_credit_s=0.41, hopes=lambda: Sharing(HALF))
    choice = choose(STATE, hopeful)
    decision = choice.decision
    assert (decision.draft_len, decision.reason, decision.size) == (3, Reason.PROBE, SIZES[1])
    assert decision.row_drafts == Sharing(HALF).drafts(3, 8)
    assert choice.charge_s == pytest.approx(0.4) and choice.rate == 8.0
    plain = Decision(0, Reason.COST)
    for other in (
        beliefs,
        replace(hopeful, row_credit_s=0.39),
        replace(hopeful, hopes=lambda: unknown),
        replace(hopeful, row_credit_s=1.0, costs=Costs(common, {SIZES[1]: 14.8 / 8 / LITTLE})),
    ):
        assert choose(STATE, other).decision == plain


def table(rows: int, token_s: float = 0.48) -> CostTable:
    """Verified tokens cost most, as where there are many rows."""
    common = [StepCost(k, rows, 1.0 + 0.05 * k + token_s * k, 0.0) for k in range(4)]
    ragged = [
        StepCost(k, rows, 1.0 + 0.05 * k + token_s * (share - 1), 0.0, int(share * rows))
        for k in (1, 2, 3)
        for share in (1.5, 2.0, 2.5)
        if share <= k + 0.5
    ]
    return CostTable.from_costs([*common, *ragged], padded=True)


def drive(
    rows: list[Row],
    chance: Callable[[Row, int], float],  # in which step
    num_steps: int,
    seed: int = 0,
    knows_rows: bool = True,
    token_s: float = 0.48,
) -> tuple[float, list[Decision]]:
    """Tokens a second in the last half of so many steps, and what was decided then."""
    costs, source = table(len(rows), token_s), np.random.default_rng(seed)
    controller = AutoController(costs, 3, num_slots=len(rows) if knows_rows else 0)
    sizes = tuple(RaggedSize(c.draft_len, c.rows, c.tokens) for c in costs.ragged)
    lens = (1, 2, 3)
    state = AutoInput(len(rows), (("greedy", float(len(rows))),), 100, 3, lens, lens, sizes, rows)
    tokens, seconds, decisions = 0, 0.0, []
    for step in range(num_steps):
        decision = controller.decide(state)
        k = decision.draft_len
        drafts = np.array(decision.row_drafts or [k] * len(rows))  # [R]
        drawn = source.random((len(rows), 3)) < np.array([[chance(row, step)] for row in rows])  # [R, 3]
        correct = np.minimum(np.logical_and.accumulate(drawn, axis=1).sum(axis=1), drafts)  # [R]
        size = decision.size
        taken = costs.seconds(k, len(rows), 100) if size is None else costs.ragged_seconds(size, 100)
        came = [int(((drafts >= d) & (correct >= d - 1)).sum()) for d in range(1, k + 1)]
        did = [int((correct >= d).sum()) for d in range(1, k + 1)]
        tallies = (ClassTally("greedy", tuple(came), tuple(did)),) if k and size is None else ()
        outcomes = told(rows, drafts.tolist(), correct.tolist()) if k else None
        controller.observe(CommittedStep(decision, len(rows), 100, taken, tallies, outcomes))
        if step >= num_steps // 2:
            tokens, seconds = tokens + len(rows) + int(correct.sum()), seconds + taken
            decisions.append(decision)
    assert controller.figures().get("ragged_steps", 0) >= sum(d.size is not None for d in decisions)
    return tokens / seconds, decisions


def halves(row: Row, step: int) -> float:
    return (0.05, 0.95)[row.slot % 2]


@pytest.mark.parametrize(("token_s", "seed"), [(0.48, 0), (0.5, 1), (0.6, 2)])
def test_requests_that_differ_get_drafts_that_differ(token_s: float, seed: int) -> None:
    """Also where no common length is better than plain decoding."""
    rows = rows_of(64)
    rate, decisions = drive(rows, halves, 300, seed, token_s=token_s)
    common, _ = drive(rows, halves, 300, seed, knows_rows=False, token_s=token_s)
    chosen = [d for d in decisions if d.size is not None]
    assert len(chosen) > 0.9 * len(decisions) and rate > 1.08 * common
    drafts = np.array([d.row_drafts for d in chosen]).mean(axis=0)  # [R]
    assert drafts[0::2].min() > 0.8, "slots 1, 3, …"
    assert drafts[1::2].max() < 0.3


def test_requests_that_are_alike_lose_nothing_by_it() -> None:
    rows = rows_of(64)
    rate, _ = drive(rows, lambda row, step: 0.6, 400)
    common, _ = drive(rows, lambda row, step: 0.6, 400, knows_rows=False)
    assert rate > 0.985 * common


def test_plain_decoding_is_left_when_some_requests_become_good() -> None:
    """After so many plain steps that nothing is known of any row."""
    rows = rows_of(64)
    rate, decisions = drive(
        rows, lambda row, step: 0.05 if step < 400 else halves(row, step), 800, token_s=0.5
    )
    assert sum(d.draft_len == 0 for d in decisions[:40]) > 30, "they were plain"
    assert sum(d.size is not None for d in decisions[-100:]) > 90
    assert rate > 1.05 * 64


def test_probes_that_find_nothing_cost_little() -> None:
    rows = rows_of(64)
    rate, decisions = drive(rows, lambda row, step: 0.4, 800, token_s=0.5)
    assert any(d.reason is Reason.PROBE and d.size is not None for d in decisions)
    assert rate > 0.985 * 64, "plain decoding gives 64"


@pytest.mark.parametrize(("num_accepted", "left_s"), [(0, 0.8), (8, 0.925), (64, 1.4)])
def test_a_probe_gets_back_what_its_drafts_were_worth(num_accepted: int, left_s: float) -> None:
    """It takes 0.6 s more than the plain step that is the best, which gives 64 tokens in 1 s."""
    rows, costs = rows_of(64), table(64, 0.5)
    controller = AutoController(costs, 3, {"greedy": (0.5,)}, num_slots=64)
    controller.observe(CommittedStep(Decision(0, Reason.COST), 64, 100, 1.0))
    sizes = tuple(RaggedSize(c.draft_len, c.rows, c.tokens) for c in costs.ragged)
    state = AutoInput(64, (("greedy", 64.0),), 100, 3, (1, 2, 3), (1, 2, 3), sizes, rows)
    lost, seen = controller.decide(state), controller.decide(state)
    assert lost.reason is seen.reason is Reason.PROBE and seen.size == RaggedSize(2, 64, 128)
    assert controller.figures()["row_probe_credit_s"] == pytest.approx(2.0 - 2 * 0.6)
    correct = [0] * 64
    for index in [index for index, k in enumerate(seen.row_drafts) if k][:num_accepted]:
        correct[index] = 1
    controller.observe(CommittedStep(seen, 64, 100, 1.6, (), told(rows, seen.row_drafts, correct)))
    assert controller.figures()["row_probe_credit_s"] == pytest.approx(left_s)


def test_deciding_for_256_rows_takes_little_time() -> None:
    """The bound is far above the 150 us it takes."""
    rows, controller, costs = rows_of(256), AutoController(table(256), 3, num_slots=256), table(256)
    sizes = tuple(RaggedSize(c.draft_len, c.rows, c.tokens) for c in costs.ragged)
    state = AutoInput(256, (("greedy", 256.0),), 100, 3, (1, 2, 3), (1, 2, 3), sizes, rows)
    outcomes = told(rows, [2] * 256, [1, 2] * 128)
    best = float("inf")
    for _ in range(5):
        began = time.process_time()
        for _ in range(40):
            decision = controller.decide(state)
            controller.observe(CommittedStep(decision, 256, 100, 1.0, (), outcomes))
        best = min(best, (time.process_time() - began) / 40)
    assert best < 1e-3, f"{best * 1e6:.0f} us"

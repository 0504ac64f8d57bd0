"""The policy of ``auto``: tables, properties, and what probes may cost."""

from __future__ import annotations

import ast
import random
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import sglang.srt.speculative.auto as auto
from sglang.srt.model_executor.step_plan import StepCost
from sglang.srt.speculative.acceptance import AcceptanceEstimate
from sglang.srt.speculative.auto import AutoInput, Beliefs, choose, decide_auto
from sglang.srt.speculative.controller import PROBE_FRACTION, AutoController, ClassTally, CommittedStep
from sglang.srt.speculative.cost_model import CostModel
from sglang.srt.speculative.cost_table import CostTable
from sglang.srt.speculative.toggle import Decision, Reason

SIZES = (1, 8, 64, 256)
TABLE = CostTable.from_costs(
    [
        StepCost(k, n, 4e-3 + 3e-4 * k + 2.5e-5 * n * (k + 1) + 2e-7 * max(0, n * (k + 1) - 128) ** 1.1, 3e-8)
        for k in range(4)
        for n in SIZES
    ],
    padded=True,
)
STATE = AutoInput(
    num_decoding=8,
    class_counts=(("greedy", 8.0),),
    kv_tokens=8000,
    num_steps=3,
    prepared_lens=(1, 2, 3),
    fitting_lens=(1, 2, 3),
)


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds by draft length, known exactly."""

    seconds: dict[int, float]
    doubt: float = 0.0

    def both_seconds(self, draft_len: int, rows: int, kv_tokens: float) -> tuple[float, float]:
        return self.seconds[draft_len], self.seconds[draft_len] * (1 - self.doubt)


@dataclass(frozen=True, slots=True)
class Parts:
    """Every draft's chance, known exactly; and what it may be at best."""

    part: float
    most: float | None = None

    def _extra(self, counts: tuple[tuple[str, float], ...], longest: int, part: float) -> list[float]:
        rows = sum(n for _, n in counts)
        return [rows * sum(part**d for d in range(1, k + 1)) for k in range(longest + 1)]

    def extra_tokens(self, counts: tuple[tuple[str, float], ...], longest: int) -> list[float]:
        return self._extra(counts, longest, self.part)

    def most_extra_tokens(self, counts: tuple[tuple[str, float], ...], longest: int) -> list[float]:
        return self._extra(counts, longest, self.part if self.most is None else self.most)


COSTS = Costs({0: 1.0, 1: 1.2, 2: 1.4, 3: 1.6})


@pytest.mark.parametrize(
    ("change", "part", "expected"),
    [
        ({}, 0.9, Decision(3, Reason.COST)),
        ({}, 0.5, Decision(1, Reason.COST)),  # 1.5 / 1.2 = 1.75 / 1.4, and shorter
        ({}, 0.1, Decision(0, Reason.COST)),
        ({"fitting_lens": (1,)}, 0.9, Decision(1, Reason.COST)),
        ({"prepared_lens": (3,), "fitting_lens": (3,)}, 0.9, Decision(3, Reason.COST)),
        ({"class_counts": (("greedy", 1.0),)}, 0.9, Decision(0, Reason.COST)),  # 7 of 8 rows accept none
        ({"num_steps": 0, "prepared_lens": (), "fitting_lens": ()}, 0.9, Decision(0, Reason.NO_DRAFTER)),
        ({"prepared_lens": (), "fitting_lens": ()}, 0.9, Decision(0, Reason.BATCH_SIZE)),
        ({"class_counts": ()}, 0.9, Decision(0, Reason.REQUEST)),
        ({"fitting_lens": ()}, 0.9, Decision(0, Reason.MEMORY)),
    ],
)
def test_decisions(change: dict[str, object], part: float, expected: Decision) -> None:
    state = replace(STATE, **change)  # type: ignore[arg-type]
    assert decide_auto(state, Beliefs(COSTS, Parts(part), 0.0)) == expected


@pytest.mark.parametrize(
    ("part", "most", "credit_s", "expected", "charge_s"),
    [
        (0.1, 0.1, 1.0, Decision(0, Reason.COST), 0.0),  # no hope
        (0.1, 0.9, 0.0, Decision(0, Reason.COST), 0.0),  # no credit
        (0.1, 0.9, 0.5, Decision(0, Reason.COST), 0.0),  # too little: 3 drafts may cost 1.6 - 1.0 for nothing
        (0.1, 0.9, 0.7, Decision(3, Reason.PROBE), 0.6),
        (0.1, 0.22, 0.7, Decision(1, Reason.PROBE), 0.2),
        (0.5, 0.9, 0.7, Decision(3, Reason.PROBE), 0.4),  # beyond what the best one, 1 draft, takes
        (0.9, 1.0, 9.0, Decision(3, Reason.COST), 0.0),  # the longest is the best already
    ],
)
def test_probes(part: float, most: float, credit_s: float, expected: Decision, charge_s: float) -> None:
    choice = choose(STATE, Beliefs(COSTS, Parts(part, most), credit_s))
    assert choice.decision == expected
    assert choice.charge_s == pytest.approx(charge_s)


def test_a_shorter_draft_is_probed_for_its_time_alone() -> None:
    """Plain would win if its time were 10 % less than was measured."""
    seconds = {0: 1.0, 1: 1.02, 2: 9.0, 3: 9.0}
    sure = Beliefs(Costs(seconds), Parts(0.05, 0.99), 0.5)
    assert decide_auto(STATE, sure) == Decision(1, Reason.COST)
    choice = choose(STATE, replace(sure, costs=Costs(seconds, doubt=0.1)))
    assert choice.decision == Decision(0, Reason.PROBE)
    assert choice.charge_s == pytest.approx(1.0 - 1.02 / 1.05)


rates = st.floats(0.0, 1.0)
seconds = st.floats(1e-3, 10.0)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(seconds, min_size=2, max_size=7),
    st.integers(1, 256),
    st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), rates), min_size=1, max_size=3),
    st.lists(st.lists(rates, min_size=6, max_size=6), min_size=3, max_size=3),
    st.data(),
)
def test_the_choice_is_the_best_of_all(
    times: list[float],
    rows: int,
    shares: list[tuple[str, float]],
    parts: list[list[float]],
    data: st.DataObject,
) -> None:
    lens = sorted(data.draw(st.sets(st.sampled_from(range(1, len(times))))))
    counts = tuple((name, share * rows / len(shares)) for name, share in shares)
    prior = dict(zip("abc", parts, strict=True))
    state = AutoInput(rows, counts, rows * 100, len(times) - 1, tuple(lens), tuple(lens))
    costs = Costs(dict(enumerate(times)))
    decision = decide_auto(state, Beliefs(costs, AcceptanceEstimate(6, prior), 0.0))

    def rate(k: int) -> float:
        tokens = float(rows)
        for name, n in counts:
            reached = n
            for part in prior[name][:k]:
                reached *= part
                tokens += reached
        return tokens / times[k]

    if not lens:
        assert decision == Decision(0, Reason.BATCH_SIZE)
    else:
        assert decision.reason is Reason.COST
        assert decision.draft_len in (0, *lens)
        assert rate(decision.draft_len) >= max(rate(k) for k in (0, *lens)) * (1 - 1e-9)


@settings(max_examples=80, deadline=None)
@given(st.lists(seconds, min_size=4, max_size=4), rates, rates)
def test_more_acceptance_never_shortens_the_draft(times: list[float], first: float, second: float) -> None:
    low, high = sorted((first, second))
    costs = Costs(dict(enumerate(sorted(times))))
    chosen = [decide_auto(STATE, Beliefs(costs, Parts(part), 0.0)).draft_len for part in (low, high)]
    assert chosen[0] <= chosen[1]


@settings(max_examples=80, deadline=None)
@given(st.lists(seconds, min_size=4, max_size=4), rates, st.integers(1, 3), st.floats(1.0, 3.0))
def test_a_dearer_length_is_never_chosen_more(times: list[float], part: float, k: int, factor: float) -> None:
    def chosen(costs: list[float]) -> int:
        return decide_auto(STATE, Beliefs(Costs(dict(enumerate(costs))), Parts(part), 0.0)).draft_len

    dearer = [t * factor if index == k else t for index, t in enumerate(times)]
    if chosen(times) != k:
        assert chosen(dearer) == chosen(times)


class Probing(RuleBasedStateMachine):
    """Whatever happens, probes cost at most their fraction of the other steps' time, even at their worst."""

    def __init__(self) -> None:
        super().__init__()
        self.controller = AutoController(TABLE, 3)
        self.source = random.Random(0)
        self.other_s = 0.0
        self.lost_s = 0.0

    @rule(rows=st.sampled_from([1, 3, 8, 64, 200]), part=rates, steps=st.integers(1, 60))
    def run(self, rows: int, part: float, steps: int) -> None:
        state = replace(
            STATE, num_decoding=rows, class_counts=(("greedy", float(rows)),), kv_tokens=rows * 900
        )
        for _ in range(steps):
            before = self.controller.figures()["probe_charged_s"]
            decision = self.controller.decide(state)
            taken = TABLE.seconds(decision.draft_len, rows, state.kv_tokens)
            if decision.reason is Reason.PROBE:
                self.lost_s += self.controller.figures()["probe_charged_s"] - before
            else:
                self.other_s += taken
            accepted = [sum(self.source.random() < part**d for _ in range(rows)) for d in (1, 2, 3)]
            k = decision.draft_len
            tallies = (
                (ClassTally("greedy", (rows,) * k, tuple(sorted(accepted[:k], reverse=True))),) if k else ()
            )
            self.controller.observe(CommittedStep(decision, rows, state.kv_tokens, taken, tallies))

    @invariant()
    def probes_are_paid(self) -> None:
        figures = self.controller.figures()
        assert figures["probe_credit_s"] >= 0.0
        assert self.lost_s <= PROBE_FRACTION * self.other_s + 1e-12
        assert self.lost_s == pytest.approx(figures["probe_charged_s"])


TestProbing = Probing.TestCase
TestProbing.settings = settings(max_examples=10, stateful_step_count=12, deadline=None)


def _drive(controller: AutoController, rows: int, part: float, num_steps: int, seed: int = 0) -> Counter[int]:
    """Run steps of rows that accept each draft with this chance; how often each length was chosen."""
    source = random.Random(seed)
    state = replace(STATE, num_decoding=rows, class_counts=(("greedy", float(rows)),), kv_tokens=rows * 900)
    chosen: Counter[int] = Counter()
    for _ in range(num_steps):
        decision = controller.decide(state)
        k = decision.draft_len
        chosen[k] += 1
        accepted = [0] * k
        for _ in range(rows):
            for depth in range(k):
                if source.random() >= part:
                    break
                accepted[depth] += 1
        tallies = (ClassTally("greedy", (rows,) * k, tuple(accepted)),) if k else ()
        taken = TABLE.seconds(k, rows, state.kv_tokens)
        controller.observe(CommittedStep(decision, rows, state.kv_tokens, taken, tallies))
    return chosen


@pytest.mark.parametrize("rows", [1, 64])
def test_it_stops_speculating_and_finds_back(rows: int) -> None:
    controller = AutoController(TABLE, 3)
    assert _drive(controller, rows, 0.9, 400)[3] > 340
    _drive(controller, rows, 0.02, 400)
    assert _drive(controller, rows, 0.02, 500)[0] > 450
    _drive(controller, rows, 0.9, 1500)
    assert _drive(controller, rows, 0.9, 300)[3] > 260


def test_a_table_that_is_wrong_about_plain_steps_is_found_out() -> None:
    """Plain steps take 8 % less than was measured: speculation, thought a little better, isn't."""
    costs = [StepCost(0, 8, 1.08, 0.0), StepCost(1, 8, 1.10, 0.0)]
    controller = AutoController(CostTable.from_costs(costs, padded=True), 1, {"greedy": [0.04]})
    state = replace(STATE, prepared_lens=(1,), fitting_lens=(1,), num_steps=1)
    chosen: Counter[int] = Counter()
    for step in range(4000):
        decision = controller.decide(state)
        k = decision.draft_len
        chosen[k] += step >= 3000
        tallies = (ClassTally("greedy", (8,), (int(step % 3 == 0),)),) if k else ()
        controller.observe(CommittedStep(decision, 8, 8000, (1.0, 1.10)[k], tallies))
    assert chosen[0] > 900


def test_deciding_and_learning_take_little_time() -> None:
    """Once a step, and a step of 128 rows is 10 ms on a GPU. The bound is far above the 45 us it takes."""
    controller = AutoController(TABLE, 3)
    state = replace(STATE, num_decoding=128, class_counts=(("greedy", 64.0), ("sampled", 64.0)))
    tallies = tuple(ClassTally(name, (64, 64, 64), (40, 20, 10)) for name in ("greedy", "sampled"))
    best = min(_timed(controller, state, tallies) for _ in range(5))
    assert best < 250e-6


def _timed(controller: AutoController, state: AutoInput, tallies: tuple[ClassTally, ...]) -> float:
    began = time.process_time()
    for _ in range(300):
        decision = controller.decide(state)
        controller.observe(CommittedStep(decision, 128, state.kv_tokens, 0.01, tallies))
    return (time.process_time() - began) / 300


def test_figures_say_what_is_believed() -> None:
    controller = AutoController(TABLE, 3)
    _drive(controller, 8, 0.6, 50)
    figures = controller.figures()
    assert set(figures["acceptance"]) == {"greedy"}
    assert len(figures["acceptance"]["greedy"]["by_depth"]) == 3
    assert figures["cost_corrections"]["common"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    "module", ["auto", "acceptance", "cost_model", "cost_table", "controller", "schedule"]
)
def test_the_policy_is_pure(module: str) -> None:
    tree = ast.parse((Path(auto.__file__).parent / f"{module}.py").read_text())
    names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert not {name.split(".")[0] for name in names} & {"torch", "time", "random", "os", "numpy"}


def test_costs_are_read_through_the_model() -> None:
    model = CostModel(TABLE)
    beliefs = Beliefs(model, AcceptanceEstimate(3, {"greedy": [0.6]}), 0.0)
    assert decide_auto(STATE, beliefs).draft_len > 0
    for _ in range(500):
        for k in (1, 2, 3):
            model.observe(k, 8, 8000, 3 * TABLE.seconds(k, 8, 8000))
        model.observe(0, 8, 8000, TABLE.seconds(0, 8, 8000))
    assert decide_auto(STATE, beliefs) == Decision(0, Reason.COST)

"""Simulated acceptance. Run alone: ``pytest test/unit/speculative/test_simulate.py``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.plan_driver import PlanDriver
from helpers.tiny_executor import tiny_executor
from torch.utils._python_dispatch import TorchDispatchMode

from sgl_kernel.speculation.accept import Accepted, SlotRows, accept_ref
from sglang.srt.managers.executor_build import ExecutorArgsError
from sglang.srt.model_executor.step_plan import SpecShape
from sglang.srt.speculative.simulate import (
    FIXED_TOKEN,
    METHODS,
    SimulatedAcceptance,
    SimulationError,
    SimulationSettings,
    simulated_acceptance,
)
from sglang.srt.speculative.tree import TreeBuilder

VOCAB = 500
Drafts = tuple[torch.Tensor, torch.Tensor | None]  # tokens [R, N], parents


def _chain(num_rows: int, generator: torch.Generator) -> Drafts:
    return torch.randint(VOCAB, (num_rows, 4), generator=generator), None


def _tree(num_rows: int, generator: torch.Generator) -> Drafts:
    """(2, 4, 16), from random ranks."""
    builder, ids = TreeBuilder(4), torch.arange(VOCAB)
    frontier = builder.add_roots_children(torch.randn(num_rows, 1, VOCAB, generator=generator), ids)
    builder.add_children(frontier, torch.randn(num_rows, 4, VOCAB, generator=generator), ids)
    tree = builder.build(torch.zeros(num_rows, dtype=torch.int64), 16)
    return tree.tokens, tree.parents


class Run:
    """Steps of ``rows`` requests in slots 1, 2, …; their state advances as a step's does."""

    def __init__(self, settings: SimulationSettings, drafts: Callable[..., Drafts], rows: int) -> None:
        self.num_steps = 3 if drafts is _chain else 2
        self.simulated = SimulatedAcceptance(settings, self.num_steps, "cpu")
        self.drafts, self.slots = drafts, torch.arange(1, rows + 1)
        unlimited = torch.full((rows + 1,), 2**31)
        self.state = SlotRows(
            torch.full((rows + 1,), 7, dtype=torch.int32), torch.zeros(rows + 1).long(), unlimited
        )
        self.generator = torch.Generator().manual_seed(0)

    def step(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Drafts [R, N], the target's choices [R, N], what is put out [R, C], counts [R]."""
        rows = len(self.slots)
        tokens, parents = self.drafts(rows, self.generator)
        choice = torch.randint(VOCAB, tokens.shape, generator=self.generator)
        drafts, chosen = tokens.clone(), choice.clone()
        root = self.state.seq_len[self.slots].long()
        self.simulated.rewrite(tokens, choice, root, self.slots, parents)
        out = Accepted.make(rows, self.num_steps + 1, "cpu")
        faulty = torch.zeros_like(tokens, dtype=torch.bool)
        accept_ref(tokens, choice, faulty, self.slots, root, self.state, out, parents)
        return drafts, chosen, out.tokens.clone(), out.counts.clone()


def _mean(run: Run, steps: int) -> float:
    return float(torch.stack([run.step()[3] for _ in range(steps)]).double().mean())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("drafts,longest", [(_chain, 4), (_tree, 3)])
@pytest.mark.parametrize(
    "length",
    [
        0.3,
        1.4,
        pytest.param(2.0, marks=pytest.mark.long),
        2.5,
        pytest.param(2.9, marks=pytest.mark.long),
        9.0,
    ],
)
def test_mean_length_is_the_one_asked_for(
    method: str, drafts: Callable[..., Drafts], longest: int, length: float
) -> None:
    mean = _mean(Run(SimulationSettings(length, method), drafts, rows=16), steps=250)
    assert mean == pytest.approx(min(max(length, 1), longest), rel=0.02)


def test_short_runs_of_match_expected_have_the_mean_too() -> None:
    """A benchmark of 256 tokens has 100 steps; a random draw would be off by 2 %."""
    assert _mean(Run(SimulationSettings(2.5), _chain, rows=1), steps=100) == pytest.approx(2.5, rel=0.005)


def test_match_expected_is_one_draw_a_step_of_two_lengths() -> None:
    run = Run(SimulationSettings(2.5, "match-expected"), _chain, rows=5)
    counts = torch.stack([run.step()[3] for _ in range(40)])
    assert (counts == counts[:, :1]).all() and set(counts.flatten().tolist()) == {2, 3}


def test_multinomial_spreads_like_a_normal_and_depends_on_root_and_slot_alone() -> None:
    run = Run(SimulationSettings(2.5, "multinomial"), _chain, rows=16)
    counts = torch.cat([run.step()[3] for _ in range(250)]).double()
    assert set(counts.tolist()) == {1, 2, 3, 4}
    expected = torch.tensor([0.1587, 0.3413, 0.3413, 0.1587])  # of a normal around 2.5, cut at 1.5, 2.5, 3.5
    assert torch.allclose(torch.bincount(counts.long())[1:] / len(counts), expected, atol=0.02)
    one, other = (SimulatedAcceptance(SimulationSettings(2.5, "multinomial"), 3, "cpu") for _ in range(2))
    root, slots, order = torch.randint(9000, (64,)), torch.randint(99, (64,)), torch.randperm(64)
    first, second = torch.zeros(64, 4).long(), torch.zeros(64, 4).long()
    one.rewrite(first, torch.zeros(64, 4).long(), root, slots)
    other.rewrite(torch.zeros(3, 4).long(), torch.zeros(3, 4).long(), root[:3], slots[:3])
    other.rewrite(second, torch.zeros(64, 4).long(), root[order], slots[order])
    assert torch.equal(first[order], second) and len(first.unique(dim=0)) == 4


@pytest.mark.parametrize("drafts", [_chain, _tree])
def test_fixed_puts_out_one_token(drafts: Callable[..., Drafts]) -> None:
    run = Run(SimulationSettings(2.2), drafts, rows=4)
    for _ in range(20):
        _, _, tokens, counts = run.step()
        column = torch.arange(tokens.shape[1])
        assert (tokens[column < counts[:, None]] == FIXED_TOKEN).all()
        assert (run.state.next_token[1:] == FIXED_TOKEN).all()


def test_real_draft_tokens_are_put_out_and_then_the_targets_choice() -> None:
    run = Run(SimulationSettings(2.5, "multinomial", "real-draft-token"), _chain, rows=16)
    for _ in range(20):
        drafts, chosen, tokens, counts = run.step()
        for row, count in enumerate(counts.tolist()):
            wanted = [*drafts[row, 1:count].tolist(), int(chosen[row, count - 1])]
            assert tokens[row, :count].tolist() == wanted


def test_plain_steps_are_left_alone() -> None:
    simulated = SimulatedAcceptance(SimulationSettings(2.5), 3, "cpu")
    tokens, choice = torch.tensor([[5], [6]]), torch.tensor([[7], [8]])
    simulated.rewrite(tokens, choice, torch.tensor([3, 4]), torch.tensor([1, 2]))
    assert tokens.tolist() == [[5], [6]] and choice.tolist() == [[7], [8]]


def test_a_shorter_chain_has_its_own_longest() -> None:
    simulated = SimulatedAcceptance(SimulationSettings(3.5), 3, "cpu")
    tokens, choice = torch.zeros(2, 3).long(), torch.ones(2, 3).long()
    simulated.rewrite(tokens, choice, torch.tensor([3, 4]), torch.tensor([1, 2]))
    assert torch.equal(tokens[:, 1:], choice[:, :-1])


def test_a_shorter_chain_takes_the_same_drafts() -> None:
    """A drafter is not better for being asked for less."""
    for method in METHODS:
        one, other = (SimulatedAcceptance(SimulationSettings(2.2, method), 3, "cpu") for _ in range(2))
        root, slots = torch.randint(9000, (64,)), torch.randint(99, (64,))
        full, short = torch.zeros(64, 4).long(), torch.zeros(64, 3).long()
        one.rewrite(full, full.clone(), root, slots)
        other.rewrite(short, short.clone(), root, slots)
        assert torch.equal(full[:, :3], short)


@pytest.mark.parametrize("length", [1.0, 1.3, 2.5, 4.0])
def test_geometric_drafts_are_all_as_likely(length: float) -> None:
    first, second, third = SimulatedAcceptance(SimulationSettings(length, "geometric"), 3, "cpu").survival
    assert 1 + first + second + third == pytest.approx(length)
    assert second == pytest.approx(first**2) and third == pytest.approx(first**3)


@pytest.mark.parametrize("method", METHODS)
def test_another_length_in_place(method: str) -> None:
    """A graph holds the table's address: a new length has to arrive in the same one."""
    run = Run(SimulationSettings(1.4, method), _chain, rows=16)
    table = run.simulated._misses
    assert _mean(run, steps=250) == pytest.approx(1.4, rel=0.02)
    run.simulated.set_length(2.9)
    assert run.simulated._misses is table
    assert _mean(run, steps=250) == pytest.approx(2.9, rel=0.02)
    assert 1 + sum(run.simulated.survival) == pytest.approx(2.9)


class NothingGoesToTheHost(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero"), name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("drafts", [_chain, _tree])
def test_no_host_in_it(method: str, drafts: Callable[..., Drafts]) -> None:
    simulated = SimulatedAcceptance(SimulationSettings(2.5, method), 3 if drafts is _chain else 2, "cpu")
    tokens, parents = drafts(3, torch.Generator().manual_seed(0))
    with NothingGoesToTheHost():
        simulated.rewrite(tokens, tokens.clone(), torch.tensor([1, 2, 3]), torch.tensor([1, 2, 3]), parents)
        with pytest.raises(AssertionError, match="_local_scalar_dense"):
            tokens.sum().item()


@pytest.mark.parametrize(
    "environ,expected",
    [
        ({}, None),
        ({"SGLANG_SIMULATE_ACC_LEN": "-1"}, None),
        ({"SGLANG_SIMULATE_ACC_LEN": "0"}, None),
        ({"SGLANG_SIMULATE_ACC_LEN": "2.5"}, SimulationSettings(2.5, "match-expected", "fixed")),
        (
            {
                "SGLANG_SIMULATE_ACC_LEN": "3",
                "SGLANG_SIMULATE_ACC_METHOD": "multinomial",
                "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token",
            },
            SimulationSettings(3.0, "multinomial", "real-draft-token"),
        ),
    ],
)
def test_settings(environ: dict[str, str], expected: SimulationSettings | None) -> None:
    assert SimulationSettings.from_environment(environ) == expected


@pytest.mark.parametrize(
    "environ,spec,vocab,message",
    [
        ({"SGLANG_SIMULATE_ACC_LEN": "much"}, SpecShape(3), 500, "ACC_LEN needs a number, got 'much'"),
        ({"SGLANG_SIMULATE_ACC_LEN": "nan"}, SpecShape(3), 500, "ACC_LEN needs a number"),
        (
            {"SGLANG_SIMULATE_ACC_METHOD": "binomial"},
            SpecShape(3),
            500,
            "one of match-expected, multinomial, geometric",
        ),
        ({"SGLANG_SIMULATE_ACC_TOKEN_MODE": "real"}, SpecShape(3), 500, "one of fixed, real-draft-token"),
        (
            {"SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token"},
            SpecShape(2, 4, 16),
            500,
            "eagle-topk 1, got 4",
        ),
        ({}, SpecShape(3), 100, "puts out token 100, but the vocabulary has 100 ids"),
    ],
)
def test_errors(environ: dict[str, str], spec: SpecShape, vocab: int, message: str) -> None:
    with pytest.raises(SimulationError, match=message):
        simulated_acceptance({"SGLANG_SIMULATE_ACC_LEN": "2"} | environ, spec, vocab, "cpu")


def test_says_so_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert simulated_acceptance({"SGLANG_SIMULATE_ACC_LEN": "9"}, SpecShape(3), 500, "cpu") is not None
        assert simulated_acceptance({"SGLANG_SIMULATE_ACC_LEN": "2"}, None, 500, "cpu") is None
    assert "SIMULATED: 4 tokens a speculative step" in caplog.messages[0]
    assert "no drafter" in caplog.messages[1]


@pytest.mark.parametrize("shape", [(3, 1, 4), (2, 4, 16)])
def test_in_an_executor(shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "2.5")
    executor = tiny_executor(shape)
    driver = PlanDriver(executor)
    requests = [driver.add([5, 6, 7]), driver.add([9] * 20)]
    for step in range(80):
        driver.step(requests, shape[0] if step % 2 else 0)
    executor.shutdown()
    for request in requests:
        plain, spec = request.counts[::2], request.counts[1::2]
        assert set(plain) == {1} and sum(spec) / len(spec) == pytest.approx(2.5, rel=0.02)


def test_an_executor_refuses_nonsense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "2;5")
    with pytest.raises(ExecutorArgsError, match="needs a number"):
        tiny_executor((3, 1, 4))


@pytest.mark.parametrize("method", METHODS)
def test_slots_have_lengths_in_turn(method: str) -> None:
    """And other ones in place of these, which captured graphs go by."""
    run = Run(SimulationSettings(2.5, method, others=(1.2, 3.1)), _chain, rows=18)
    table = run.simulated._misses.data_ptr()
    for lengths in ((2.5, 1.2, 3.1), (1.5, 2.0, 1.1), (2.2,) * 3):
        run.simulated.set_length(*(lengths if len(set(lengths)) > 1 else lengths[:1]))
        counts = torch.stack([run.step()[3] for _ in range(250)]).double().mean(dim=0)  # [R]
        for index, length in enumerate(lengths):
            of_class = counts[run.slots % 3 == index].mean()
            assert float(of_class) == pytest.approx(length, rel=0.06)
    assert run.simulated._misses.data_ptr() == table


def test_lengths_from_the_environment() -> None:
    settings = SimulationSettings.from_environment({"SGLANG_SIMULATE_ACC_LEN": "2.5,1.5"})
    assert settings is not None and settings.lengths == (2.5, 1.5)
    assert SimulationSettings.from_environment({"SGLANG_SIMULATE_ACC_LEN": "2.5,-1"}) is None

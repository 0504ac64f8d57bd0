"""KernelSampler chooses what Sampler chooses, and asks nothing on the host.

By the ops' references here, and by the kernels themselves in the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from sgl_kernel.sampling.rows import Depths, NodeRows
from sgl_kernel.testing.interpret import interpret
from sglang.srt.model_executor.step_plan import SlotAdmission, SlotSampling
from sglang.srt.sampling import kernel_sampler
from sglang.srt.sampling.kernel_rules import MAX_SUPPRESSED
from sglang.srt.sampling.kernel_sampler import KernelSampler
from sglang.srt.sampling.rows import ChoiceRows
from sglang.srt.sampling.sampler import Sampler
from sglang.srt.sampling.sampling_params import MAX_LOGIT_BIASES

V = 40
SLOTS = 5  # usable ones
DEVICE = torch.device("cpu")
TREES = (
    None,
    (-1, 0, 0, 1),  # parents
    (-1, 0, 0, 0, 2, 2, 4),
)

ids = st.integers(0, V - 1)
id_lists = st.lists(ids, max_size=6).map(tuple)
samplings = st.builds(
    SlotSampling,
    temperature=st.sampled_from([0.0, 0.3, 0.8, 1.0, 1.7]),
    top_k=st.sampled_from([-1, -1, 1, 3, 17, V, 10 * V]),
    top_p=st.sampled_from([1.0, 1.0, 0.35, 0.77, 0.93]),
    min_p=st.sampled_from([0.0, 0.0, 0.013, 0.21]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.4, -1.1]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.9, -0.3]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.4, 0.6]),
    min_new_tokens=st.sampled_from([0, 1, 3, 9]),
    suppressed_ids=st.one_of(id_lists, st.just(tuple(range(V))), st.just(tuple(range(1, V)))),
    logit_bias=st.lists(st.tuples(ids, st.sampled_from([-100.0, -1.5, 2.0, 30.0])), max_size=6).map(tuple),
    seed=st.integers(-(2**63), 2**63 - 1),
)
lives = st.builds(
    lambda prompt_len, sampling, outputs: (prompt_len, sampling, outputs),
    st.integers(1, 9),
    samplings,
    id_lists,
)


@dataclass(frozen=True, slots=True)
class Case:
    former: list[Any]  # (prompt_len, sampling, outputs) of every slot, and then again
    lives: list[Any]
    slots: list[int]  # of the batch; 0: a pad row
    tree: tuple[int, ...] | None
    num_nodes: int
    scratch: int
    seed: int


cases = st.builds(
    Case,
    former=st.lists(lives, min_size=SLOTS, max_size=SLOTS),
    lives=st.lists(lives, min_size=SLOTS, max_size=SLOTS),
    slots=st.permutations([0, 0, 1, 2, 3, 4, 5]).flatmap(
        lambda slots: st.integers(1, 7).map(lambda n: list(slots)[:n])
    ),
    tree=st.sampled_from(TREES),
    num_nodes=st.integers(1, 4),
    scratch=st.sampled_from([7, 11, 30, 1000]),
    seed=st.integers(0, 2**31),
)


def _samplers(case: Case) -> tuple[Sampler, KernelSampler]:
    """Both, with the slots in their second life."""
    plain, kernel = Sampler(SLOTS + 1, V, DEVICE), KernelSampler(SLOTS + 1, V, DEVICE)
    kernel.reserve(case.scratch)
    for generation in (case.former, case.lives):
        admissions = [
            SlotAdmission(slot, prompt_len, 0, sampling, outputs)
            for slot, (prompt_len, sampling, outputs) in enumerate(generation, 1)
        ]
        for sampler in (plain, kernel):
            sampler.admit(())
            sampler.admit(admissions)
    return plain, kernel


def _rows(case: Case) -> ChoiceRows:
    generator = torch.Generator().manual_seed(case.seed)
    num_rows, parents = len(case.slots), case.tree
    num_nodes = case.num_nodes if parents is None else len(parents)
    lengths = [1, *(prompt_len + len(outputs) for prompt_len, _, outputs in case.lives)]
    root = torch.tensor([lengths[slot] - 1 for slot in case.slots])
    # Few ids, so that drafts repeat each other and the outputs.
    tokens = torch.randint(6, (num_rows, num_nodes), generator=generator)
    slots = torch.tensor(case.slots)
    if parents is None:
        depths = torch.arange(num_nodes).expand(num_rows, num_nodes)
        return ChoiceRows(tuple(case.slots), slots, root, tokens, depths)
    mask = torch.eye(num_nodes, dtype=torch.bool)
    for node, parent in enumerate(parents[1:], 1):
        mask[node] |= mask[parent]
    mask = mask.expand(num_rows, -1, -1)
    depths = mask.sum(dim=2) - 1
    return ChoiceRows(tuple(case.slots), slots, root, tokens, depths, mask, int(depths.max()) + 1)


def _logits(num_lines: int, seed: int) -> torch.Tensor:
    """Close together, with ties, and now and then broken."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_lines, V, generator=generator) * 2
    logits[:, 30:] = logits[:, :10]
    for line in range(num_lines):
        kind = int(torch.randint(12, (1,), generator=generator))
        if kind < 3:
            at = int(torch.randint(V, (1,), generator=generator))
            logits[line, at] = (torch.nan, torch.inf, -torch.inf)[kind]
    return logits


@settings(max_examples=150, deadline=None, derandomize=True)
@given(cases)
def test_it_chooses_what_the_plain_sampler_chooses(case: Case) -> None:
    """Tokens and faults; then again after both took note of what was put out."""
    plain, kernel = _samplers(case)
    rows = _rows(case)
    num_columns = rows.num_nodes
    for seed in (case.seed, case.seed + 1):
        logits = _logits(len(case.slots) * rows.num_nodes, seed)
        wanted = plain.choose(logits.clone(), rows)
        got = kernel.choose(logits.clone(), rows)
        assert got.faulty.equal(wanted.faulty)
        assert got.tokens.equal(wanted.tokens)
        counts = torch.tensor([0 if slot == 0 else 1 + slot % num_columns for slot in case.slots])
        plain.count(rows, wanted.tokens, counts)
        kernel.count(rows, got.tokens, counts)
        for slot in range(1, SLOTS + 1):
            if plain.penalties.needs(slot):
                assert kernel.rules.states.token_counts[slot].equal(plain.penalties.counts[slot])
    assert kernel.rules.states.token_counts[0].sum() == 0 and kernel.rules.states.asks[0] == 0
    assert kernel.any_sampled(case.slots) == plain.any_sampled(case.slots)
    assert kernel.states.draft_cap.equal(plain.states.draft_cap)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(cases, st.integers(1, 4))
def test_a_guess_is_the_best_of_the_draft_scores(case: Case, offset: int) -> None:
    plain, kernel = _samplers(case)
    slots = torch.tensor(case.slots)
    root = torch.arange(len(case.slots), dtype=torch.int32) * 3
    generator = torch.Generator().manual_seed(case.seed)
    target_ids = torch.randperm(V, generator=generator)[:13]
    logits = torch.randn(len(case.slots), 13, generator=generator)
    logits[:, 12] = logits[:, 0]
    scores = plain.states.draft_scores(logits[:, None], slots, root.to(torch.int64) + offset, target_ids)
    out = torch.full((len(case.slots), 3), -1)
    before = logits.clone()
    kernel.guess(logits, slots, root, offset, target_ids, out[:, 1])
    assert out[:, 1].equal(target_ids[scores[:, 0].argmax(dim=-1)])
    assert (out[:, [0, 2]] == -1).all() and logits.equal(before)


class NothingOnTheHost(TorchDispatchMode):
    """Refuses what would wait for a device, and takes down everything else that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = str(func).removeprefix("aten.").split(".")[0]
        waits = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "is_nonzero"}
        moves = name == "_to_copy" and (kwargs or {}).get("device") is not None
        # From host values: made in the middle of a step they would be a copy that is waited for.
        made = name == "lift_fresh" and args[0].dim() > 0  # a single number becomes an argument
        by_mask = name in {"index", "index_put", "index_put_"} and any(
            i is not None and i.dtype == torch.bool for i in args[1]
        )
        assert not (name in waits or moves or made or by_mask), f"{func} waits for the device"
        shapes = [tuple(a.shape) for a in args if isinstance(a, torch.Tensor)]
        self.ran.append(f"{func} {shapes}")
        return func(*args, **(kwargs or {}))


EVERYTHING = SlotSampling(
    temperature=0.9,
    top_k=20,
    top_p=0.9,
    min_p=0.01,
    frequency_penalty=0.5,
    repetition_penalty=1.2,
    min_new_tokens=9,
    suppressed_ids=(3, 4),
    logit_bias=((5, 1.0), (6, -1.0)),
)


def _one_sampling(sampling: SlotSampling) -> tuple[Sampler, KernelSampler]:
    life = (4, sampling, (1, 2))
    return _samplers(Case([life] * SLOTS, [life] * SLOTS, [], None, 1, 8, 0))


@pytest.mark.parametrize("tree", TREES)
def test_the_same_launches_whatever_the_rows_ask(tree: tuple[int, ...] | None) -> None:
    """A graph of one batch must be right for all others: nothing decided or read on the host."""
    ran = []
    for sampling in (SlotSampling(temperature=0.0), EVERYTHING):
        _, kernel = _one_sampling(sampling)
        life = (4, sampling, (1, 2))
        rows = _rows(Case([life] * SLOTS, [life] * SLOTS, [1, 0, 3, 5], tree, 3, 8, 1))
        nodes = NodeRows(rows.slots, rows.root_index.to(torch.int32), rows.num_nodes)
        if tree is not None:
            depths = rows.depths.contiguous()
            nodes = NodeRows(rows.slots, rows.root_index, rows.num_nodes, Depths.TREE, depths)
        logits, counts = _logits(nodes.num_lines, 2), torch.tensor([1, 0, 2, 3])
        out, draft_ids = torch.zeros(4, 2, dtype=torch.int64), torch.arange(9)
        draft_logits = logits[:4, :9].contiguous()
        with NothingOnTheHost() as mode:
            tokens, _ = kernel.choose_nodes(logits, nodes, rows.tokens, rows.mask)
            kernel.count_rows(rows.slots, tokens, counts)
            kernel.guess(draft_logits, rows.slots, rows.root_index, 2, draft_ids, out[:, 0])
        ran.append(mode.ran)
    assert ran[0] == ran[1] and len(ran[0]) > 20


def test_the_rule_about_the_host_can_fail() -> None:
    plain, _ = _one_sampling(EVERYTHING)
    rows = _rows(Case([], [(4, EVERYTHING, (1, 2))] * SLOTS, [1, 2], None, 1, 8, 1))
    with NothingOnTheHost(), pytest.raises(AssertionError, match="waits for the device"):
        plain.choose(_logits(2, 0), ChoiceRows((1, 0), *(getattr(rows, f) for f in _TENSORS)))
    for waiting in (lambda t: t[t > 0], lambda t: t.sum().item(), lambda t: torch.tensor([1]) + t):
        with NothingOnTheHost(), pytest.raises(AssertionError, match="waits for the device"):
            waiting(torch.ones(1))


_TENSORS = ("slots", "root_index", "tokens", "depths")


@pytest.mark.parametrize(("num_nodes", "per_part"), [(1, 256), (3, 84), (100, 2)])
def test_scratch_does_not_grow_with_the_batch(
    num_nodes: int, per_part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, kernel = Sampler(SLOTS + 1, V, DEVICE), KernelSampler(SLOTS + 1, V, DEVICE)
    kernel.reserve(100_000)
    for sampler in (plain, kernel):
        sampler.admit([SlotAdmission(s, 1, 0, SlotSampling(top_k=s, seed=s)) for s in range(1, SLOTS + 1)])
    held, address, parts = kernel.bytes, kernel._scratch.data_ptr(), []

    def watched(logits: torch.Tensor, rows: NodeRows, *rest: torch.Tensor, pdl: bool) -> torch.Tensor:
        scratch = rest[4]
        assert scratch.shape == logits.shape and scratch.data_ptr() == address and scratch.is_contiguous()
        parts.append(rows.slots.shape[0])
        return of_kernel(logits, rows, *rest, pdl=pdl)

    of_kernel: Callable[..., torch.Tensor] = kernel_sampler.filter_cutoffs
    monkeypatch.setattr(kernel_sampler, "filter_cutoffs", watched)
    num_rows = 600 // num_nodes + 1
    slots = torch.arange(num_rows) % (SLOTS + 1)
    tokens = torch.zeros(num_rows, num_nodes, dtype=torch.int64)
    depths = torch.arange(num_nodes).expand(num_rows, num_nodes)
    rows = ChoiceRows(tuple(slots.tolist()), slots, torch.arange(num_rows), tokens, depths)
    logits = torch.randn(num_rows * num_nodes, V, generator=torch.Generator().manual_seed(1))
    got = kernel.choose(logits.clone(), rows)
    assert got.tokens.equal(plain.choose(logits.clone(), rows).tokens)
    assert max(parts) == per_part and sum(parts) == num_rows and kernel.bytes == held
    assert kernel.choose(logits[:0], rows.take([])).tokens.shape == (0, num_nodes)


def test_memory_is_what_the_tensors_hold() -> None:
    small, large = KernelSampler(3, 100, DEVICE), KernelSampler(4, 100, DEVICE)
    a_slot = 100 * 4 + MAX_LOGIT_BIASES * (8 + 4) + MAX_SUPPRESSED * 8 + 6 * 4 + 8 + 3 * 4 + 3 * 8
    assert large.bytes - small.bytes == a_slot
    before = small.bytes
    small.reserve(7)
    assert small.bytes - before == 7 * 100 * 4


def test_what_a_graph_may_hold_is_not_reserved_twice_and_not_forgotten() -> None:
    _, kernel = _one_sampling(SlotSampling(temperature=0.0))
    with pytest.raises(AssertionError, match="graph"):
        kernel.reserve(1000)
    rows = NodeRows(torch.tensor([1]), torch.tensor([4]), 9)
    with pytest.raises(AssertionError, match="reserve"):
        kernel.choose_nodes(_logits(9, 0), rows, torch.zeros(1, 9, dtype=torch.int64))


@pytest.mark.parametrize(
    "sampling",
    [
        SlotSampling(logit_bias=((V, 1.0),)),
        SlotSampling(logit_bias=((1, 1.0),) * (MAX_LOGIT_BIASES + 1)),
        SlotSampling(min_new_tokens=1, suppressed_ids=(-1,)),
        SlotSampling(min_new_tokens=1, suppressed_ids=(1,) * (MAX_SUPPRESSED + 1)),
    ],
)
def test_lists_that_do_not_fit_are_faults_of_the_caller(sampling: SlotSampling) -> None:
    with pytest.raises(AssertionError, match="room for|vocabulary"):
        KernelSampler(2, V, DEVICE).admit([SlotAdmission(1, 1, 0, sampling)])


def test_full_lists() -> None:
    """As many entries as may be given; the same id many times adds up."""
    biases = tuple((i % 7, 0.25) for i in range(MAX_LOGIT_BIASES))
    sampling = SlotSampling(0.0, logit_bias=biases, min_new_tokens=2, suppressed_ids=(0,) * MAX_SUPPRESSED)
    plain, kernel = _one_sampling(sampling)
    life = (4, sampling, ())
    rows = _rows(Case([], [life] * SLOTS, [2], None, 3, 8, 0))
    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(3))
    got = kernel.choose(logits.clone(), rows).tokens
    assert got.equal(plain.choose(logits.clone(), rows).tokens)
    assert (got < 7).all() and (got > 0).any()


def body_kernels() -> None:
    """Every tree, with slots in their second life and lists shorter than the first one's."""
    generator = torch.Generator().manual_seed(7)
    greedy = SlotSampling(temperature=0.0)
    short = SlotSampling(
        temperature=1.2, logit_bias=((9, 3.0),), min_new_tokens=6, suppressed_ids=(2,), min_p=0.02, seed=5
    )
    warm = SlotSampling(temperature=0.8, top_p=0.77, presence_penalty=0.7, seed=-9)
    for tree in TREES:
        former = [(3, EVERYTHING, (1, 1))] * SLOTS
        lives = [(3, s, (0, 5, 5)) for s in (short, greedy, warm, EVERYTHING, greedy)]
        seed = int(torch.randint(1000, (1,), generator=generator))
        case = Case(former, lives, [1, 2, 3, 0, 4, 5], tree, 3, 11, seed)
        plain, kernel = _samplers(case)
        rows = _rows(case)
        logits = _logits(len(case.slots) * rows.num_nodes, seed)
        wanted, got = plain.choose(logits.clone(), rows), kernel.choose(logits.clone(), rows)
        assert got.faulty.equal(wanted.faulty) and got.tokens.equal(wanted.tokens)
        counts = torch.tensor([1, 2, 3, 0, 1, 1])
        plain.count(rows, wanted.tokens, counts)
        kernel.count(rows, got.tokens, counts)
        for slot in (3, 4):
            assert kernel.rules.states.token_counts[slot].equal(plain.penalties.counts[slot])
        slots, root, target_ids = torch.tensor(case.slots), torch.arange(6), torch.arange(20) * 2
        draft_logits = torch.randn(6, 20, generator=generator)
        scores = plain.states.draft_scores(draft_logits[:, None], slots, root + 2, target_ids)
        out = torch.zeros(6, 4, dtype=torch.int64)
        kernel.guess(draft_logits, slots, root, 2, target_ids, out[:, 2])
        assert out[:, 2].equal(target_ids[scores[:, 0].argmax(dim=-1)])


def test_the_kernels_choose_the_same() -> None:
    pytest.importorskip("triton", reason="kernels need triton")
    interpret(__file__, "body_kernels")

"""Choosing tokens: each feature against a plain Python oracle that knows one row and one path."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from sglang.srt.model_executor.step_plan import SlotAdmission, SlotSampling
from sglang.srt.sampling.filters import FilterLimits, filter_scores
from sglang.srt.sampling.gumbel import noise
from sglang.srt.sampling.rows import ChoiceRows
from sglang.srt.sampling.sampler import Sampler

V = 24
PROMPT_LEN = 5
DEVICE = torch.device("cpu")
GREEDY = SlotSampling(temperature=0.0)


def _process(logits: list[float], sampling: SlotSampling, outputs: list[int]) -> list[float]:
    """Penalties, bias and suppression, in SGLang's definitions."""
    out = list(logits)
    for token in set(outputs):
        out[token] -= sampling.frequency_penalty * outputs.count(token) + sampling.presence_penalty
        factor = sampling.repetition_penalty
        out[token] = out[token] * factor if out[token] < 0 else out[token] / factor
    for token, bias in sampling.logit_bias:
        out[token] += bias
    if len(outputs) < sampling.min_new_tokens:
        for token in sampling.suppressed_ids:
            out[token] = -math.inf
    return out


def _kept(scores: list[float], sampling: SlotSampling) -> set[int]:
    """Ids that joint top-k, top-p and min-p leave."""
    best = max(scores)
    total = sum(math.exp(s - best) for s in scores)
    probs = [math.exp(s - best) / total for s in scores]
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    kept, before = set(), 0.0
    for rank, i in enumerate(order):
        in_k = sampling.top_k <= 0 or rank < sampling.top_k
        in_p = sampling.top_p >= 1 or before <= sampling.top_p
        in_min = probs[i] >= sampling.min_p * probs[order[0]]
        if rank == 0 or (in_k and in_p and in_min):
            kept.add(i)
        before += probs[i]
    return kept


def _choose(logits: list[float], sampling: SlotSampling, outputs: list[int]) -> int:
    scores = _process(logits, sampling, outputs)
    if sampling.temperature == 0 or sampling.top_k == 1:
        return max(range(V), key=lambda i: (scores[i], -i))
    scores = [s / torch.tensor(sampling.temperature).item() for s in scores]
    kept = _kept(scores, sampling)
    index = torch.tensor([PROMPT_LEN + len(outputs)])
    drawn = noise(torch.tensor([sampling.seed]), index, torch.arange(V))[0].tolist()
    return max(kept, key=lambda i: (scores[i] + drawn[i], -i))


def _rows(slots: list[int], outputs: list[list[int]], drafts: list[list[int]]) -> ChoiceRows:
    tokens = torch.tensor([[o[-1] if o else 0, *d] for o, d in zip(outputs, drafts, strict=True)])
    depths = torch.arange(tokens.shape[1]).expand(tokens.shape)
    root = torch.tensor([PROMPT_LEN + len(o) - 1 for o in outputs])
    return ChoiceRows(tuple(slots), torch.tensor(slots), root, tokens, depths)


def _sampler(samplings: list[SlotSampling], outputs: list[list[int]]) -> Sampler:
    sampler = Sampler(len(samplings) + 1, V, DEVICE)
    sampler.admit(
        [
            SlotAdmission(slot, PROMPT_LEN, 0, sampling, tuple(out))
            for slot, (sampling, out) in enumerate(zip(samplings, outputs, strict=True), start=1)
        ]
    )
    return sampler


FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "warm": {"temperature": 0.8},
    "top_k": {"temperature": 1.1, "top_k": 4},
    "top_k of 1": {"temperature": 1.1, "top_k": 1},
    "top_p": {"temperature": 0.9, "top_p": 0.6},
    "min_p": {"temperature": 0.9, "min_p": 0.2},
    "all filters": {"temperature": 1.5, "top_k": 9, "top_p": 0.8, "min_p": 0.05},
    "penalties": {
        "temperature": 0.0,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.3,
        "repetition_penalty": 1.3,
    },
    "warm penalties": {"temperature": 0.7, "frequency_penalty": -0.5, "repetition_penalty": 0.8},
    "bias": {"temperature": 0.0, "logit_bias": ((3, 2.5), (7, -100.0), (9, 1.0))},
    "one bias": {"temperature": 1.0, "logit_bias": ((11, 6.0),)},
    "min_new_tokens": {"temperature": 0.0, "min_new_tokens": 4, "suppressed_ids": (2, 5, 8)},
    "min_new_tokens, fewer ids": {"temperature": 1.0, "min_new_tokens": 2, "suppressed_ids": (1,)},
    "everything": {
        "temperature": 0.9,
        "top_p": 0.9,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "logit_bias": ((0, 1.0), (4, -2.0)),
        "min_new_tokens": 3,
        "suppressed_ids": (6, 7),
    },
}


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_every_node_is_what_a_plain_step_would_choose(num_drafts: int) -> None:
    """All features in one batch; node j sees the outputs and the drafts up to it."""
    for trial in range(20):
        rng = random.Random(trial)
        samplings = [
            SlotSampling(**fields, seed=rng.randrange(-(2**63), 2**63)) for fields in FEATURES.values()
        ]
        outputs = [[rng.randrange(V) for _ in range(rng.randrange(6))] for _ in samplings]
        drafts = [[rng.randrange(V) for _ in range(num_drafts)] for _ in samplings]
        slots = list(range(1, len(samplings) + 1))
        logits = (
            torch.randn(len(slots), num_drafts + 1, V, generator=torch.Generator().manual_seed(trial)) * 2
        )
        sampler = _sampler(samplings, outputs)
        choice = sampler.choose(logits.flatten(0, 1).clone(), _rows(slots, outputs, drafts))
        for row, name in enumerate(FEATURES):
            for j in range(num_drafts + 1):
                history = outputs[row] + drafts[row][:j]
                expected = _choose(logits[row, j].tolist(), samplings[row], history)
                assert choice.tokens[row, j] == expected, (trial, name, j)
        assert not choice.faulty.any()


def test_tree_nodes_see_their_own_path() -> None:
    """Node 3 hangs from node 1, node 2 is another branch: node 3 must not see node 2."""
    sampling = SlotSampling(temperature=0.0, presence_penalty=2.0)
    sampler = _sampler([sampling], [[4]])
    tokens = torch.tensor([[4, 7, 8, 9]])
    mask = torch.tensor([[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]], dtype=torch.bool)
    rows = ChoiceRows(
        (1,), torch.tensor([1]), torch.tensor([5]), tokens, torch.tensor([[0, 1, 1, 2]]), mask, 3
    )
    logits = torch.zeros(1, 4, V)
    logits[..., [4, 7, 8, 9]] = torch.tensor([4.0, 3.0, 2.0, 1.0])
    choice = sampler.choose(logits.flatten(0, 1).clone(), rows)
    expected = [
        _choose(logits[0, j].tolist(), sampling, h) for j, h in enumerate([[4], [4, 7], [4, 8], [4, 7, 9]])
    ]
    assert choice.tokens[0].tolist() == expected


def test_counts_follow_what_was_put_out() -> None:
    sampling = SlotSampling(temperature=0.0, frequency_penalty=1.0)
    sampler = _sampler([sampling, GREEDY], [[3, 3], [3]])
    rows = _rows([2, 1], [[3], [3, 3]], [[0, 0], [0, 0]])
    sampler.count(rows, torch.tensor([[9, 9, 9], [5, 3, 7]]), torch.tensor([3, 2]))
    counts = sampler.penalties.counts
    assert counts[1].nonzero().flatten().tolist() == [3, 5]
    assert counts[1, [3, 5]].tolist() == [3, 1]
    assert counts[2].sum() == 0 and counts[0].sum() == 0  # not asked for, and the pad slot


def test_a_new_life_forgets_the_old_one() -> None:
    everything = SlotSampling(**FEATURES["everything"], draft_cap=0)
    sampler = _sampler([everything], [[3, 3, 4]])
    sampler.admit([SlotAdmission(1, PROMPT_LEN, 0, GREEDY)])
    logits = torch.zeros(1, V)
    assert sampler.choose(logits.clone(), _rows([1], [[]], [[]])).tokens.tolist() == [[0]]
    assert int(sampler.states.draft_cap[1]) > 1000 and not sampler.any_sampled((1,))
    sampler.admit([SlotAdmission(1, PROMPT_LEN, 0, replace(everything, temperature=0.0), (9,))])
    assert sampler.penalties.counts[1].nonzero().flatten().tolist() == [9]


def test_faulty_rows_leave_the_others_alone() -> None:
    warm = SlotSampling(temperature=1.0, top_p=0.9, seed=4)
    logits = torch.randn(4, V, generator=torch.Generator().manual_seed(0))
    sampler = _sampler([warm, GREEDY, warm, GREEDY], [[], [], [], []])
    rows = _rows([1, 2, 3, 4], [[]] * 4, [[]] * 4)
    clean = sampler.choose(logits.clone(), rows)
    logits[1, 3], logits[2, 0] = math.nan, math.inf
    broken = sampler.choose(logits.clone(), rows)
    assert broken.faulty[:, 0].tolist() == [False, True, True, False]
    assert broken.tokens[[1, 2], 0].tolist() == [0, 0]
    assert broken.tokens[[0, 3]].equal(clean.tokens[[0, 3]])


def test_equal_logits_choose_the_lowest_id() -> None:
    logits = torch.zeros(2, V)
    logits[1, 7:] = 1.0
    choice = _sampler([GREEDY, GREEDY], [[], []]).choose(logits, _rows([1, 2], [[], []], [[], []]))
    assert choice.tokens[:, 0].tolist() == [0, 7]


def _limits(*rows: tuple[int, float, float]) -> FilterLimits:
    top_k, top_p, min_p = zip(*rows, strict=True)
    return FilterLimits(torch.tensor(top_k), torch.tensor(top_p), torch.tensor(min_p))


def test_a_row_does_not_depend_on_its_batch() -> None:
    """Bit for bit: the same row alone, and among others. Some end within the first look, some don't."""
    scores = torch.randn(6, 5000, generator=torch.Generator().manual_seed(1)) * 3
    rows = [
        (40, 0.9, 0.0),
        (5000, 0.5, 0.01),
        (7, 1.0, 0.0),
        (5000, 0.999, 0.0),
        (2000, 1.0, 0.0),
        (300, 0.7, 0.02),
    ]
    whole = filter_scores(scores, _limits(*rows))
    for row in range(6):
        assert filter_scores(scores[row : row + 1], _limits(rows[row])).equal(whole[row : row + 1])
        kept = set(whole[row].isfinite().nonzero().flatten().tolist())
        sampling = SlotSampling(top_k=rows[row][0], top_p=rows[row][1], min_p=rows[row][2])
        assert kept == _kept(scores[row].tolist(), sampling)


def test_equal_scores_stay_together() -> None:
    scores = torch.tensor([[1.0, 3.0, 1.0, 2.0, 1.0, 0.0]])
    kept = filter_scores(scores, _limits((3, 1.0, 0.0))).isfinite()
    assert kept.tolist() == [[True, True, True, True, True, False]]


def test_limits_of_one_keep_everything() -> None:
    scores = torch.randn(1, 50_000, generator=torch.Generator().manual_seed(2))
    assert filter_scores(scores, _limits((50_000, 1.0, 0.0))).equal(scores)


def test_filters_with_suppressed_ids_still_choose() -> None:
    """Ids at -inf before the filter must not turn the row into NaN."""
    only = SlotSampling(temperature=1.0, top_p=0.5, min_new_tokens=9, suppressed_ids=tuple(range(V - 1)))
    choice = _sampler([only], [[]]).choose(torch.zeros(1, V), _rows([1], [[]], [[]]))
    assert choice.tokens.tolist() == [[V - 1]] and not choice.faulty.any()

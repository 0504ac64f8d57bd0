"""Choosing tokens: the whole pipeline against the CPU server's sampler, by the references and by the
kernels in the interpreter; the bits of the noise; compilation at real vocabularies."""

from __future__ import annotations

import pytest
import torch

from sgl_kernel.sampling.choose import ChoiceBuffers, choose, choose_launches
from sgl_kernel.sampling.filters.ops import filter_cutoffs, filter_launch
from sgl_kernel.sampling.noise import gumbel_noise, noise_launch, random_bits
from sgl_kernel.sampling.rows import Depths, NodeRows
from sgl_kernel.sampling.rules import ops as rules_ops
from sgl_kernel.sampling.rules.ops import (
    Asks,
    RuleStates,
    apply_rules,
    count_launch,
    count_outputs,
    rules_launch,
)
from sgl_kernel.testing.compile_gate import check
from sgl_kernel.testing.interpret import interpret
from sglang.srt.model_executor.step_plan import SlotAdmission, SlotSampling
from sglang.srt.sampling import gumbel
from sglang.srt.sampling.filters import FilterLimits, filter_scores
from sglang.srt.sampling.rows import ChoiceRows
from sglang.srt.sampling.sampler import Sampler

V = 300
PROMPT_LEN = 5
SAMPLINGS = (
    SlotSampling(temperature=0.0),
    SlotSampling(temperature=0.7, seed=-(2**62) - 12345),
    SlotSampling(temperature=1.3, top_k=5, seed=2**63 - 1),
    SlotSampling(temperature=1.0, top_p=0.6, min_p=0.02, seed=7),
    SlotSampling(
        temperature=0.0, frequency_penalty=1.5, repetition_penalty=1.7, logit_bias=((3, 4.0), (9, -9.0))
    ),
    SlotSampling(
        temperature=0.9,
        top_p=0.9,
        top_k=40,
        presence_penalty=-0.7,
        repetition_penalty=0.6,
        min_new_tokens=3,
        suppressed_ids=(4, 17, 200),
        logit_bias=((17, 8.0), (4, 8.0), (250, 3.0)),
        seed=11,
    ),
    SlotSampling(temperature=1.0, min_p=0.3, seed=3, min_new_tokens=1, suppressed_ids=(1,)),
)


def _sampler() -> Sampler:
    """Slot i + 1 samples by SAMPLINGS[i]; each has three outputs already."""
    sampler = Sampler(len(SAMPLINGS) + 1, V, torch.device("cpu"))
    sampler.admit(
        [
            SlotAdmission(slot, PROMPT_LEN, 0, sampling, output_ids=(4, 4, 50 + slot))
            for slot, sampling in enumerate(SAMPLINGS, 1)
        ]
    )
    return sampler


def _states(sampler: Sampler) -> RuleStates:
    """The same per-slot rows, as the kernels take them."""
    _, bias, early = sampler._rules
    asks = [0]
    for s in SAMPLINGS:
        penalties = s.frequency_penalty or s.presence_penalty or s.repetition_penalty != 1
        wanted = Asks.PENALTIES if penalties else Asks(0)
        wanted |= Asks.BIASES if s.logit_bias else Asks(0)
        asks.append(int(wanted | (Asks.SUPPRESSION if s.suppressed_ids else Asks(0))))
    penalties_state = sampler.penalties
    return RuleStates(
        torch.tensor(asks, dtype=torch.int32),
        penalties_state.counts,
        penalties_state.frequency,
        penalties_state.presence,
        penalties_state.repetition,
        bias._lists.ids,
        bias._bias,
        torch.tensor([0, *(len(s.logit_bias) for s in SAMPLINGS)], dtype=torch.int32),
        early._lists.ids,
        torch.tensor([0, *(len(s.suppressed_ids) for s in SAMPLINGS)], dtype=torch.int32),
        early._free_from,
    )


def _nodes(tree: bool) -> tuple[ChoiceRows, NodeRows]:
    num = len(SAMPLINGS)
    slots_cpu = tuple(range(num, 0, -1))
    slots = torch.tensor(slots_cpu)
    tokens = torch.randint(V, (num, 4), generator=torch.Generator().manual_seed(1))
    tokens[:, 1] = 4
    root = PROMPT_LEN + 1 + torch.arange(num) % 2
    if not tree:
        depths = torch.arange(4).expand(num, 4)
        return ChoiceRows(slots_cpu, slots, root, tokens, depths), NodeRows(slots, root, 4)
    depths = torch.tensor([0, 1, 1, 2]).expand(num, 4).contiguous()
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)
    mask = mask.expand(num, 4, 4).contiguous()
    return ChoiceRows(slots_cpu, slots, root, tokens, depths, mask, 3), NodeRows(
        slots, root, 4, Depths.TREE, depths
    )


def _logits(num_lines: int) -> torch.Tensor:
    """Close together and with ties, so that every rule and the noise decide something."""
    logits = torch.randn(num_lines, V, generator=torch.Generator().manual_seed(2)) * 2
    logits[:, 60:80] = logits[:, 40:60]
    logits[0, 290] = logits[0].max() + 1
    logits[0, 299] = logits[0, 290]  # a tie of a greedy row: the lower id wins
    logits[5, 7], logits[9, 200], logits[14, 0] = torch.nan, torch.inf, -torch.inf
    return logits


def body_pipeline() -> None:
    for tree in (False, True):
        sampler = _sampler()
        states = _states(sampler)
        server_rows, rows = _nodes(tree)
        logits = _logits(rows.num_lines)
        wanted = sampler.choose(logits.clone(), server_rows)
        s = sampler.states
        logits = apply_rules(logits, rows, server_rows.tokens, states, mask=server_rows.mask)
        scratch, cutoffs = torch.full_like(logits, torch.nan), torch.empty(rows.num_lines)
        filter_cutoffs(logits, rows, s.temperature, s.top_k, s.top_p, s.min_p, scratch, cutoffs)
        buffers = ChoiceBuffers.make(rows.num_lines, V, "cpu")
        tokens, faulty = choose(logits, rows, s.temperature, s.seed, buffers, cutoffs=cutoffs)
        assert torch.equal(faulty, wanted.faulty) and faulty.sum() == 3
        assert torch.equal(tokens, wanted.tokens)
        put_out = torch.arange(len(SAMPLINGS)) % 4 + 1
        expected = states.token_counts.clone()
        for row, slot in enumerate(server_rows.slots_cpu):
            if states.asks[slot] & Asks.PENALTIES:
                for token in tokens[row, : put_out[row]]:
                    expected[slot, token] += 1
        count_outputs(states, server_rows.slots, tokens, put_out)
        assert torch.equal(states.token_counts, expected)


def body_noise() -> None:
    seed = torch.tensor([0, -1, 2**63 - 1, -(2**63), 123456789012345])
    index = torch.tensor([0, 1, 2**31 - 1, 5, 131072])
    ids = torch.randint(0, 163840, (500,), generator=torch.Generator().manual_seed(0))
    for token_ids in (None, ids):
        used = torch.arange(500) if token_ids is None else ids
        assert torch.equal(random_bits(seed, index, 500, token_ids), gumbel.random_bits(seed, index, used))
        wanted = gumbel.noise(seed, index, used)
        torch.testing.assert_close(gumbel_noise(seed, index, 500, token_ids), wanted, rtol=2e-6, atol=1e-6)


def body_drafts() -> None:
    """A drafter's choice: its own vocabulary, noise at target ids, an index that the nodes share."""
    sampler, target_ids = _sampler(), torch.arange(40) * 7 + 3
    slots = torch.tensor([2, 1, 4])
    rows = NodeRows(slots, torch.tensor([9, 3, 8], dtype=torch.int32), 2, Depths.SHARED, offset=2)
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(4))
    index = torch.tensor([11, 5, 10])
    scores = sampler.states.draft_scores(logits.view(3, 2, 40), slots, index, target_ids)
    buffers = ChoiceBuffers.make(6, 40, "cpu")
    s = sampler.states
    got, _ = choose(logits, rows, s.temperature, s.seed, buffers, token_ids=target_ids, faults=False)
    assert torch.equal(got, target_ids[scores.argmax(dim=-1)])
    logits.fill_(torch.nan)
    got, _ = choose(logits, rows, s.temperature, s.seed, buffers, token_ids=target_ids, faults=False)
    assert (got == target_ids[0]).all(), "an id of the vocabulary, whatever the logits are"


def body_filters() -> None:
    check_filters("random", "two values")


def body_other_filters() -> None:
    check_filters("steep", "flat")


def check_filters(*names: str) -> None:
    """Against the server's filter: limits alone and together, ties at the cutoff, flat and steep rows."""
    cases = [
        (k, p, m)
        for k, p, m in (
            (V, 1.0, 0.0), (1, 1.0, 0.0), (7, 1.0, 0.0), (290, 1.0, 0.0), (V, 0.5, 0.0), (V, 0.999, 0.0),
            (V, 1e-6, 0.0), (V, 1.0, 0.1), (V, 1.0, 1.0), (50, 0.8, 0.01), (3, 0.99, 0.5), (V, 0.9999, 1e-9),
        )
    ]  # fmt: skip
    k, p, m = (torch.tensor(column) for column in zip(*cases, strict=True))
    slots = torch.arange(len(cases))
    for name in names:
        logits = torch.randn(len(cases), V, generator=torch.Generator().manual_seed(5))
        logits = {
            "random": logits,
            "steep": logits * 30,
            "flat": torch.zeros_like(logits),
            "two values": (logits > 1).float() * 3 - 1,
        }[name]
        logits[:, 100:120] = logits[:, :20]
        heat = torch.full((len(cases),), 0.8)
        rows = NodeRows(slots, slots, 1)
        cutoffs = torch.empty(len(cases))
        filter_cutoffs(logits, rows, heat, k, p, m, torch.full_like(logits, torch.nan), cutoffs)
        scores = logits / heat[:, None]
        kept = scores >= cutoffs[:, None]
        wanted = filter_scores(scores, FilterLimits(k, p, m)).isfinite()
        # A sum of probabilities that misses p by its rounding may go either way.
        probs = scores.softmax(dim=-1)
        differs = (kept != wanted).any(dim=1)
        near = ((probs * wanted).sum(dim=1) - p).abs() < 1e-6
        assert not (differs & ~near).any(), (name, differs, kept.sum(1), wanted.sum(1))
        assert differs.sum() <= 1


def body_blocks() -> None:
    """As where lines are many: one program goes through several blocks of a line."""
    num_lines, vocab = 6, 4500
    slots = torch.zeros(num_lines, dtype=torch.int64)
    slots[[3, 5]] = 1
    rows = NodeRows(slots, torch.full((num_lines,), 7), 1)
    number = torch.tensor([0, 3], dtype=torch.int32)
    ids = torch.tensor([[0] * 4, [10, 2100, 4499, 11]])  # the fourth is past the number
    states = RuleStates(
        asks=torch.tensor([0, int(Asks.PENALTIES | Asks.BIASES | Asks.SUPPRESSION)], dtype=torch.int32),
        token_counts=(torch.arange(2 * vocab).view(2, vocab) % 3).to(torch.int32),
        frequency=torch.tensor([0, 0.5]),
        presence=torch.zeros(2),
        repetition=torch.ones(2),
        bias_ids=ids,
        biases=torch.tensor([[0.0] * 4, [1.0, 2.0, 3.0, 4.0]]),
        num_biases=number,
        suppressed_ids=ids + torch.tensor([[0], [-1]]),
        num_suppressed=number,
        free_from=torch.tensor([0, 9]),
    )
    logits = torch.randn(num_lines, vocab, generator=torch.Generator().manual_seed(6))
    wanted = logits.clone()
    wanted[slots == 1] -= 0.5 * states.token_counts[1]
    wanted[:, [10, 2100, 4499]] += (slots == 1)[:, None] * torch.tensor([1.0, 2.0, 3.0])
    for token in (9, 2099, 4498):
        wanted[slots == 1, token] = -torch.finfo(torch.float32).max
    tokens = torch.zeros(num_lines, 1, dtype=torch.int64)
    for programs in (6, 12, 1024):  # of a line: 1, 2, and one a block
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rules_ops, "_PROGRAMS", programs)
            assert torch.equal(apply_rules(logits.clone(), rows, tokens, states), wanted)


BODIES = ("body_pipeline", "body_noise", "body_drafts", "body_filters", "body_blocks")


def body_all() -> None:
    for body in BODIES:
        globals()[body]()


@pytest.mark.parametrize("body", (*BODIES, "body_other_filters"))
def test_references_equal_the_server(body: str) -> None:
    globals()[body]()


def test_kernels_equal_the_server() -> None:
    pytest.importorskip("triton", reason="kernels need triton")
    interpret(__file__, "body_all")


@pytest.mark.long
def test_kernels_filter_steep_and_flat_rows() -> None:
    pytest.importorskip("triton", reason="kernels need triton")
    interpret(__file__, "body_other_filters")


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("vocab", [128256, 49152, 163840])  # Llama-3, SmolLM2, Kimi
def test_choice_fits(vocab: int) -> None:
    pytest.importorskip("triton", reason="kernels need triton")
    for num_rows, kind in ((1, Depths.CHAIN), (32, Depths.TREE)):
        rows = NodeRows(
            _meta(num_rows, dtype=torch.int64),
            _meta(num_rows, dtype=torch.int32),
            4,
            kind,
            _meta(num_rows, 4, dtype=torch.int64) if kind is Depths.TREE else None,
        )
        logits, buffers = _meta(rows.num_lines, vocab), ChoiceBuffers.make(rows.num_lines, vocab, "meta")
        slots, ids = _meta(64), _meta(vocab, dtype=torch.int64)
        cut = _meta(rows.num_lines)
        seed = _meta(64, dtype=torch.int64)
        for launch in choose_launches(logits, rows, slots, seed, buffers, None, cut, True, pdl=True):
            check(launch)
        for launch in choose_launches(logits, rows, slots, seed, buffers, ids, None, False, pdl=True):
            check(launch)


def test_filters_rules_and_noise_fit() -> None:
    pytest.importorskip("triton", reason="kernels need triton")
    i32, i64, vocab = torch.int32, torch.int64, 128256
    depths, mask = _meta(8, 16, dtype=i64), _meta(8, 16, 16, dtype=torch.bool)
    rows = NodeRows(_meta(8, dtype=i64), _meta(8, dtype=i32), 16, Depths.TREE, depths)
    logits = _meta(rows.num_lines, vocab)
    check(
        filter_launch(
            logits, rows, _meta(64), _meta(64, dtype=i64), _meta(64), _meta(64), logits, _meta(128), pdl=True
        )
    )
    number = _meta(64, dtype=i32)
    lists = (_meta(64, 300, dtype=i64), _meta(64, 300), number, _meta(64, 8, dtype=i64), number)
    counts = _meta(64, vocab, dtype=i32)
    states = RuleStates(
        _meta(64, dtype=i32), counts, _meta(64), _meta(64), _meta(64), *lists, _meta(64, dtype=i64)
    )
    tokens = _meta(8, 16, dtype=i64)
    check(rules_launch(logits, rows, tokens, states, mask, pdl=True))
    chain = NodeRows(_meta(32, dtype=i64), _meta(32, dtype=i32), 4)
    check(rules_launch(logits, chain, _meta(32, 4, dtype=i64), states, None, pdl=True))
    check(count_launch(states, rows.slots, tokens, _meta(8, dtype=i64), pdl=True))
    check(noise_launch(_meta(4, dtype=i64), _meta(4, dtype=i64), None, _meta(4, vocab)))

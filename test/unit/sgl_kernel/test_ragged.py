"""Rows of different lengths in one launch: numerics in the interpreter, compilation at real shapes."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

from helpers.paged_world import PagedWorld, paged_world

from sgl_kernel._dispatch import H200, RTX_PRO_6000, DeviceInfo
from sgl_kernel.attention import (
    AttentionShape,
    DecodePlan,
    DecodeWorkspace,
    Turn,
    View,
    decode_attention,
    plan_decode,
)
from sgl_kernel.attention.decode.op import decode_launch
from sgl_kernel.rope.ops import HeadNorms, RopeTables
from sgl_kernel.sampling.choose import ChoiceBuffers, choose, choose_launches
from sgl_kernel.sampling.filters.ops import filter_cutoffs, filter_launch
from sgl_kernel.sampling.rows import NodeRows
from sgl_kernel.sampling.rules.ops import Asks, RuleStates, apply_rules, rules_launch
from sgl_kernel.speculation.accept import Accepted, SlotRows, accept, accept_launch
from sgl_kernel.speculation.ragged.ops import Layout, lay_out, lay_out_launch, lay_out_ref
from sgl_kernel.testing.compile_gate import check
from sgl_kernel.testing.interpret import interpret

I32, I64, F32 = torch.int32, torch.int64, torch.float32
SMALL = DeviceInfo(arch=120, num_sms=20)  # few programs: chunks are long
LENS = [3, 1, 4, 2, 1]  # queries of rows
STARTS = torch.tensor([0, 3, 4, 8, 10, 11])


def rope_tables(d: int) -> RopeTables:
    angles = torch.arange(4000)[:, None] * 100.0 ** (-torch.arange(0, d, 2) / d)  # [P, d / 2]
    return RopeTables(torch.cat((angles.cos(),) * 2, 1), torch.cat((-angles.sin(), angles.sin()), 1))


def ragged_plan(
    shape: AttentionShape, bases: list[int], starts: torch.Tensor | None
) -> tuple[PagedWorld, DecodePlan]:
    world = paged_world(shape, bases, 4, seed=5)
    workspace = DecodeWorkspace(shape, torch.device("cpu"), 4, SMALL)
    view = View(4, 4, causal=True, query_start=starts)
    return world, plan_decode(workspace, world.slots, world.base_lens, world.page_table, view)


def attend(
    world: PagedWorld,
    plan: DecodePlan,
    kv: torch.Tensor,
    qkv: torch.Tensor,
    positions: torch.Tensor,
    norms: bool,
) -> torch.Tensor:
    d = world.shape.head_dim
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(d, generator=generator)
    turn = Turn(qkv, rope_tables(d), positions, HeadNorms(weight, weight, 1e-6) if norms else None)
    return decode_attention(None, kv, plan, turn=turn)


def compare_attention(shape: AttentionShape, bases: list[int], norms: bool) -> DecodePlan:
    """Each row's queries give what they give where all rows have 4, of which the first ones are these.

    Places that no query is stored at stay NaN, so that whoever reads them is found out.
    """
    world, whole = ragged_plan(shape, bases, None)
    ragged = ragged_plan(shape, bases, STARTS)[1]
    qkv = world.draw(20, (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim)
    node = torch.arange(4)
    positions = (world.base_lens[:, None] + node).flatten()
    asked = (node < torch.tensor(LENS)[:, None]).flatten()
    expected_kv, kv = world.kv.clone(), world.kv.clone()
    expected = attend(world, whole, expected_kv, qkv, positions, norms)
    got = attend(world, ragged, kv, qkv[asked], positions[asked], norms)
    torch.testing.assert_close(got, expected[asked], rtol=3e-5, atol=3e-5)
    assert not ragged.counters.any()
    unasked = whole.places[~asked & (world.slots > 0).repeat_interleave(4)]
    assert kv[unasked].isnan().all()
    expected_kv[unasked] = torch.nan
    torch.testing.assert_close(kv, expected_kv, rtol=3e-5, atol=1e-5, equal_nan=True)
    return ragged


def body_attention() -> None:
    """Rows of one chunk, with norms; padding; new places that two chunks share, or that leave one empty."""
    compare_attention(AttentionShape(4, 2, 32, 16), [33, 90, 0, 7, 1], True)
    ragged = compare_attention(AttentionShape(3, 1, 32, 1), [33, 7, 1021, 0, 1022], False)
    inside = ragged.items[ragged.items[:, 0] >= 0]
    begun = inside[:, 2] - ragged.base_lens[inside[:, 0].long()]
    assert {2, 3} <= set(begun.tolist()), "no chunk begins amid the new places"


def body_levels() -> None:
    """Chunks merged in levels."""
    compare_attention(AttentionShape(4, 1, 64, 1), [2500, 20, 0, 30, 1], True)


def made_states(num_slots: int, vocab: int, generator: torch.Generator) -> RuleStates:
    def ints(high: int, *size: int, dtype: torch.dtype = I64) -> torch.Tensor:
        return torch.randint(0, high, size, generator=generator, dtype=dtype)

    asks = torch.tensor(
        [0, Asks.PENALTIES, 0, Asks.PENALTIES | Asks.BIASES, Asks.SUPPRESSION, 1, 7, 0], dtype=I32
    )
    return RuleStates(
        asks[:num_slots], ints(3, num_slots, vocab, dtype=I32), torch.rand(num_slots), torch.rand(num_slots),
        torch.rand(num_slots) + 0.7, ints(vocab, num_slots, 4), torch.rand(num_slots, 4),
        ints(4, num_slots, dtype=I32), ints(vocab, num_slots, 4), ints(4, num_slots, dtype=I32),
        ints(12, num_slots),
    )  # fmt: skip


def body_choices() -> None:
    """Rules, filters and choices of some nodes: those that all nodes have at these lines."""
    generator, vocab = torch.Generator().manual_seed(2), 300
    slots, root = torch.tensor([1, 3, 4, 6, 2]), torch.tensor([5, 9, 2, 4, 7])
    heat, seed = torch.tensor([0.0, 1.0, 0.0, 0.7, 1.3, 0.0, 0.9, 0.0]), torch.arange(8) * 2**40
    top_k, top_p = torch.tensor([300, 20, 300, 300, 5, 300, 300, 300]), torch.rand(8) * 0.2 + 0.8
    states = made_states(8, vocab, generator)
    tokens = torch.randint(0, vocab, (5, 4), generator=generator)
    logits = torch.randn(20, vocab, generator=generator)
    logits[9, 3] = torch.inf
    lines = lay_out_ref_lines()
    found = []
    for of_lines in (None, lines):
        rows = NodeRows(slots, root, 4, lines=of_lines)
        own = rows.of_lines(logits).clone()
        apply_rules(own, rows, tokens, states)
        cutoffs = torch.empty(len(own))
        filter_cutoffs(own, rows, heat, top_k, top_p, torch.zeros(8), torch.empty_like(own), cutoffs)
        buffers = ChoiceBuffers.make(len(own), vocab, "cpu")
        choice, faulty = choose(own, rows, heat, seed, buffers, cutoffs=cutoffs)
        found.append((own, cutoffs, choice.flatten(), faulty.flatten()))
    for got, expected in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, expected[lines], rtol=1e-6, atol=1e-6)
    assert found[1][3].any()


def lay_out_ref_lines() -> torch.Tensor:
    layout = Layout.make(5, 4, 11, "cpu")
    lay_out_ref(torch.zeros(5, 4, dtype=I64), torch.zeros(5, dtype=I64), torch.tensor(LENS), layout)
    return layout.lines


def body_layout() -> None:
    tokens, root = torch.arange(20).view(5, 4) + 100, torch.tensor([5, 1, 30, 4, 2])
    lens = torch.tensor(LENS)
    got, expected = (Layout.make(5, 4, 11, "cpu") for _ in range(2))
    lay_out(tokens, root, lens, got)
    lay_out_ref(tokens, root, lens, expected)
    for name in Layout.__slots__:
        assert torch.equal(getattr(got, name), getattr(expected, name)), name
    assert torch.equal(expected.query_start, STARTS)
    assert expected.positions.tolist() == [5, 6, 7, 1, 30, 31, 32, 33, 4, 5, 2]
    assert torch.equal(expected.ids, tokens.flatten()[expected.lines])
    assert expected.token_of[1].tolist() == [3] * 4 and expected.token_of[3].tolist() == [8, 9, 9, 9]


def body_accept() -> None:
    """All drafts are right: a row takes what it verified, and no more than its cap."""
    tokens = torch.arange(20).view(5, 4)
    choice, slots = (tokens + 1).contiguous(), torch.tensor([2, 1, 3, 0, 4])
    state = SlotRows(torch.full((5,), 9, dtype=I32), torch.zeros(5, dtype=I64), torch.tensor([9, 9, 9, 2, 9]))
    out = Accepted.make(5, 4, "cpu")
    faulty = torch.zeros(5, 4, dtype=torch.bool)
    root = torch.full((5,), 9)
    accept(tokens, choice, faulty, slots, root, state, out, query_lens=torch.tensor(LENS))
    assert out.counts.tolist() == [3, 1, 3, 0, 1]
    assert state.seq_len.tolist() == [9, 10, 12, 12, 10] and state.next_token.tolist() == [0, 5, 3, 11, 17]


BODIES = ("attention", "choices", "layout", "accept")


def body_all(names: list[str]) -> None:
    for name in names:
        globals()[f"body_{name}"]()


@pytest.mark.parametrize("body", BODIES)
def test_references_agree(body: str) -> None:
    globals()[f"body_{body}"]()


def test_kernels_agree() -> None:
    interpret(__file__, "body_all", names=["attention", "layout", "accept"])


@pytest.mark.long
def test_kernels_of_choices_agree() -> None:
    interpret(__file__, "body_all", names=["choices"])


@pytest.mark.long
def test_chunks_merged_in_levels() -> None:
    body_levels()
    interpret(__file__, "body_levels")


def meta(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


@pytest.mark.parametrize("info", [H200, RTX_PRO_6000], ids=lambda info: f"sm_{info.arch}")
def test_attention_fits(info: DeviceInfo) -> None:
    for shape, norms in ((AttentionShape(32, 8, 128, 1), False), (AttentionShape(32, 8, 128, 16), True)):
        workspace = DecodeWorkspace(shape, torch.device("meta"), 2, info)
        slots, table = meta(16, dtype=I64), meta(17, 8192, dtype=I32)
        view = View(4, 4, causal=True, query_start=meta(17, dtype=I64))
        plan = workspace.plan(slots, slots, table, view, 0)
        angles = RopeTables(meta(9000, 128, dtype=F32), meta(9000, 128, dtype=F32))
        weights = HeadNorms(meta(128), meta(128), 1e-6) if norms else None
        turn = Turn(meta(48, 48 * 128), angles, meta(48, dtype=I64), weights, pdl=True)
        kv, out = meta(100_000, 8, 2, 128), meta(48, 32, 128)
        check(decode_launch(None, kv, out, plan, None, None, turn), archs=(info.arch,))


def test_the_rest_fits() -> None:
    lens, tokens, vocab = meta(64, dtype=I64), meta(64, 4, dtype=I64), 128256
    check(lay_out_launch(tokens, lens, lens, Layout.make(64, 4, 160, "meta"), pdl=True))
    state = SlotRows(meta(256, dtype=I32), meta(256, dtype=I64), meta(256, dtype=I64))
    out, faulty = Accepted.make(64, 4, "meta"), meta(64, 4, dtype=torch.bool)
    check(accept_launch(tokens, tokens, faulty, lens, lens, state, out, None, lens, pdl=True))
    rows = NodeRows(lens, lens, 4, lines=meta(160, dtype=I64))
    logits, of_slots, seed = meta(160, vocab, dtype=F32), meta(64, dtype=F32), meta(64, dtype=I64)
    cut = meta(160, dtype=F32)
    buffers = ChoiceBuffers.make(160, vocab, "meta")
    for launch in choose_launches(logits, rows, of_slots, seed, buffers, None, cut, True, pdl=True):
        check(launch)
    check(filter_launch(logits, rows, of_slots, seed, of_slots, of_slots, logits, cut, pdl=True))
    number = meta(64, dtype=I32)
    lists = (meta(64, 300, dtype=I64), meta(64, 300, dtype=F32), number, meta(64, 8, dtype=I64), number)
    counts = meta(64, vocab, dtype=I32)
    states = RuleStates(number, counts, of_slots, of_slots, of_slots, *lists, meta(64, dtype=I64))
    check(rules_launch(logits, rows, tokens, states, None, pdl=True))

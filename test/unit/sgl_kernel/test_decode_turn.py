"""Decode attention that turns and writes by itself, against a launch of rope and one of attention.

Numerics in the interpreter (a test is one process with several cases), compilation at real shapes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

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
    can_turn,
    decode_attention,
    plan_decode,
)
from sgl_kernel.attention.decode.op import decode_launch
from sgl_kernel.attention.decode.reference import decode_attention_ref
from sgl_kernel.launch import Launch
from sgl_kernel.rope.ops import CachePlaces, HeadNorms, RopeTables, TokenRows, rope_cache_write_ref
from sgl_kernel.testing.compile_gate import Compiled, check, compile_launch
from sgl_kernel.testing.interpret import interpret

SMALL = DeviceInfo(arch=120, num_sms=20)  # few programs: chunks are long
LLAMA_8B = AttentionShape(32, 8, 128, 1)
SMOLLM2 = AttentionShape(9, 3, 64, 1)
QWEN3 = AttentionShape(32, 8, 128, 16)
MAX_POSITION = 4000


@dataclass(frozen=True, slots=True)
class Case:
    world: PagedWorld
    plan: DecodePlan
    turn: Turn
    kv: torch.Tensor  # [places, nkv, 2, d]: NaN where this step writes

    def queries(self, kv: torch.Tensor, kv_scale: torch.Tensor | None = None) -> torch.Tensor:
        """Turned, [T, nq, d]; writes K and V to kv."""
        shape, view, qkv = self.plan.shape, self.plan.view, self.turn.qkv
        q = torch.empty(qkv.shape[0], shape.num_heads * shape.head_dim, dtype=qkv.dtype)
        rope_cache_write_ref(
            qkv, shape.num_heads, shape.num_kv_heads if view.writes else 0, self.turn.tables,
            TokenRows(self.plan.slots.repeat_interleave(view.query_len), self.turn.positions),
            CachePlaces(kv, places=self.plan.places, kv_scale=kv_scale), self.turn.norms, q,
        )  # fmt: skip
        return q.view(-1, shape.num_heads, shape.head_dim)

    def two_launches(
        self, kv: torch.Tensor, kv_scale: torch.Tensor | None = None, scratch: torch.Tensor | None = None
    ) -> torch.Tensor:
        written = kv if scratch is None else scratch.flatten(0, 1)
        return decode_attention_ref(self.queries(written, kv_scale), kv, self.plan, kv_scale, scratch)


def tables(d: int) -> RopeTables:
    angles = torch.arange(MAX_POSITION)[:, None] * 100.0 ** (-torch.arange(0, d, 2) / d)  # [P, d / 2]
    cos, sin = angles.cos(), angles.sin()
    return RopeTables(torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1))


def make_case(
    shape: AttentionShape,
    lens: list[int],
    view: View,
    norms: bool = False,
    info: DeviceInfo = SMALL,
    dtype: torch.dtype = torch.float32,
    scratch_cap: int = 0,
) -> Case:
    world = paged_world(shape, lens, view.query_len, seed=len(lens) + view.query_len)
    workspace = DecodeWorkspace(shape, torch.device("cpu"), 4, info)
    plan = plan_decode(workspace, world.slots, world.base_lens, world.page_table, view, scratch_cap)
    d, num_tokens = shape.head_dim, len(lens) * view.query_len
    width = (shape.num_heads + (2 * shape.num_kv_heads if view.writes else 0)) * d
    qkv = world.draw(num_tokens, width + 2 * d)[:, :width].to(dtype)  # rows lie apart
    # Any positions: those of a tree are not where its nodes are stored.
    positions = torch.randint(0, MAX_POSITION, (num_tokens,), generator=world.generator)
    weights = HeadNorms(world.draw(d).to(dtype), world.draw(d).to(dtype), 1e-6) if norms else None
    return Case(world, plan, Turn(qkv, tables(d), positions, weights), world.kv.clone().to(dtype))


def compare(case: Case, tolerance: float = 3e-5, layers: int = 1) -> None:
    plan, before = case.plan, case.turn.qkv.clone()
    for _ in range(layers):  # counters must be back at zero
        got_kv, kv = case.kv.clone(), case.kv.clone()
        got = decode_attention(None, got_kv, plan, turn=case.turn)
        expected = case.two_launches(kv)
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
        # All of the pool: nothing else is written, and nothing for padded rows.
        torch.testing.assert_close(got_kv, kv, rtol=tolerance, atol=tolerance / 4, equal_nan=True)
        assert not got.view(len(plan.slots), -1)[plan.slots == 0].any()
        torch.testing.assert_close(case.turn.qkv, before, rtol=0, atol=0, equal_nan=True)
        assert not plan.counters.any()


def tree(lens: list[int], num: int) -> View:
    mask = torch.rand(len(lens), num, num, generator=torch.Generator().manual_seed(num)) < 0.4
    return View(num, num, mask=mask | torch.eye(num, dtype=torch.bool))


def body_shapes() -> None:
    """Groups, head sizes, page sizes, masks, norms, rows of padding; rows of one chunk."""
    lens = [33, 90, 0, 1]
    compare(make_case(AttentionShape(4, 1, 64, 1), lens, View(1, 1, causal=True), norms=True), layers=2)
    compare(make_case(AttentionShape(9, 3, 64, 16), lens, View(4, 4, causal=True)))
    compare(make_case(AttentionShape(8, 2, 128, 16), lens, View(1, 1, causal=True)))
    compare(make_case(AttentionShape(4, 1, 128, 1), lens, tree(lens, 4), norms=True))
    compare(make_case(AttentionShape(3, 1, 64, 16), lens, tree(lens, 3)))
    compare(
        make_case(AttentionShape(2, 2, 80, 3), lens, View(5, 5, causal=True), norms=True)
    )  # d: no power of 2
    compare(make_case(AttentionShape(4, 2, 64, 1), lens, View(2), norms=True))  # q alone


def ends_of_chunks(case: Case) -> set[int]:
    """Of each row's new places those at which a chunk begins, from the first new one."""
    inside = case.plan.items[case.plan.items[:, 0] >= 0]
    found = inside[:, 2] - case.world.base_lens[inside[:, 0].long()]
    return set(found[(found > 0) & (found < case.plan.view.query_len)].tolist())


def compare_split(base: int, end: int) -> None:
    """The last of 9 chunks of 128 begins at 1024."""
    case = make_case(AttentionShape(2, 1, 64, 1), [base, 60, 0], View(16, 16, causal=True))
    compare(case)
    assert ends_of_chunks(case) == {end}


def body_splits() -> None:
    """Chunks that end amid the new places, merged at once and in levels."""
    compare_split(1014, 10)
    lens = [2500, 20, 0, 300]
    case = make_case(AttentionShape(2, 1, 64, 16), lens, View(1, 1, causal=True))
    assert case.plan.items[:, 6].max() > 16
    compare(case)
    case = make_case(AttentionShape(4, 1, 64, 1), [1022, 253], tree([1022, 253], 4))
    assert ends_of_chunks(case) == {2}
    compare(case, layers=2)


def compare_scratch(
    shape: AttentionShape, lens: list[int], num: int, start: int, norms: bool = False
) -> None:
    """A level of a draft tree: K and V go to scratch places, the pool is left alone."""
    generator = torch.Generator().manual_seed(start)
    mask = torch.rand(len(lens), num, start + num, generator=generator) < 0.6
    mask[:, :, start:] = torch.eye(num, dtype=torch.bool)
    view = View(num, start + num, mask=mask, scratch=True, write_start=start)
    cap = start + num + 3
    case = make_case(shape, lens, view, norms, scratch_cap=cap)
    assert can_turn(case.plan)
    scratch = torch.randn(len(lens) + 1, cap, shape.num_kv_heads, 2, shape.head_dim, generator=generator)
    scratch[:, start:] = torch.nan
    own, wanted, kv = scratch.clone(), scratch.clone(), case.kv.clone()
    for _ in range(2):
        got = decode_attention(None, kv, case.plan, None, own, turn=case.turn)
        expected = case.two_launches(case.kv, None, wanted)
        torch.testing.assert_close(got, expected, rtol=3e-5, atol=3e-5)
        torch.testing.assert_close(own, wanted, rtol=3e-5, atol=1e-5, equal_nan=True)
        assert torch.equal(kv.nan_to_num(7.0), case.kv.nan_to_num(7.0)) and not case.plan.counters.any()


def body_scratch() -> None:
    compare_scratch(AttentionShape(4, 1, 64, 1), [33, 90, 0, 1], 4, 0)
    compare_scratch(AttentionShape(4, 2, 128, 16), [33, 0, 250], 4, 4, norms=True)
    # The new places of a level lie in two chunks, behind those of the levels above.
    compare_scratch(AttentionShape(3, 1, 64, 1), [1012, 60], 8, 8)


def body_other_ends() -> None:
    compare_split(1010, 14)
    compare_split(1023, 1)
    compare_scratch(AttentionShape(3, 1, 64, 1), [1006, 60], 8, 8)


def body_types() -> None:
    """bfloat16 (the interpreter truncates), and an e4m3 cache with scales for every KV head."""
    shape, lens = AttentionShape(4, 2, 64, 1), [90, 33, 0]
    case = make_case(shape, lens, View(2, 2, causal=True), norms=True, dtype=torch.bfloat16)
    case.world.kv.nan_to_num_(0.0)
    compare(case, tolerance=2**-4)
    case = make_case(shape, lens, View(2, 2, causal=True))
    scale = torch.tensor([[0.05, 0.004], [0.06, 0.03]])
    kv = (case.kv * 20).clamp(-448, 448).to(torch.float8_e4m3fn)
    got_kv = kv.clone()
    got = decode_attention(None, got_kv, case.plan, scale, turn=case.turn)
    case.two_launches(kv, scale)
    # The interpreter drops the carry into a float8's exponent: attention is of what it has stored itself.
    new = case.plan.places[:4]
    stored, wanted = got_kv[new].float(), kv[new].float()
    whole = wanted.abs().frexp().mantissa == 0.5
    assert (wanted.abs() == 448).any() and whole.float().mean() < 0.6
    torch.testing.assert_close(stored.where(~whole, wanted), wanted, rtol=2**-3, atol=2**-5)
    others = torch.ones(len(kv), dtype=torch.bool).index_fill(0, new, False)
    assert torch.equal(got_kv[others].view(torch.uint8), kv[others].view(torch.uint8))
    expected = decode_attention_ref(case.queries(kv, scale), got_kv, case.plan, scale, None)
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)


def body_faults() -> None:
    """A value that is not finite breaks those who see it alone, now and later; so does a key of NaN."""
    case = make_case(AttentionShape(4, 2, 64, 1), [90, 33], View(3, 3, causal=True))
    case.turn.qkv[1, 6 * 64 + 5] = torch.inf  # v of row 0, query 1, head 0
    case.turn.qkv[5, 5 * 64 + 7] = torch.nan  # k of row 1, query 2, head 1
    compare(case)
    kv = case.kv.clone()
    got = decode_attention(None, kv, case.plan, turn=case.turn).view(6, 2, 2, 64)  # [T, head, group, d]
    broken = got.isnan().flatten(2).any(2)
    assert broken[:, 0].tolist() == [False, True, True] + [False] * 3
    assert broken[:, 1].tolist() == [False] * 5 + [True]
    place = case.plan.places[1]
    assert kv[place, 0, 0].isnan().all() and not kv[place, 0, 1].any() and kv[place, 1].isfinite().all()
    # A plan made for longer rows: nobody's chunks reach beyond what there is.
    case = make_case(AttentionShape(2, 1, 64, 1), [400, 300], View(4, 4, causal=True))
    case.world.base_lens.sub_(150)
    for row in range(2):
        positions = torch.arange(4) + case.world.base_lens[row]
        places = case.world.page_table[case.world.slots[row], positions]
        case.plan.places[4 * row : 4 * row + 4] = places
    compare(case)


def body_all(names: list[str]) -> None:
    for name in names:
        globals()[f"body_{name}"]()


@pytest.mark.parametrize(
    "bodies",
    [
        ["shapes", "faults"],
        ["splits"],
        ["types", "scratch"],
        pytest.param(["other_ends"], marks=pytest.mark.long),
    ],
    ids="-".join,
)
def test_turning_equals_two_launches(bodies: list[str]) -> None:
    interpret(__file__, "body_all", names=bodies)


def test_reference_is_two_launches() -> None:
    """Where no kernel serves: the same values, the product left alone, the pool written."""
    lens = [33, 0, 9]
    for view in (View(3, 3, causal=True), tree(lens, 3), View(2)):
        case = make_case(AttentionShape(4, 2, 64, 4), lens, view, norms=True)
        compare(case, tolerance=0.0)
        assert case.kv.isnan().any()


def test_only_one_tile_turns() -> None:
    workspace = DecodeWorkspace(LLAMA_8B, torch.device("meta"), 2, H200)
    slots, table = meta(2, dtype=torch.int64), meta(3, 64, dtype=torch.int32)

    def turns(view: View, cap: int = 0) -> bool:
        return can_turn(workspace.plan(slots, slots, table, view, cap))

    assert all(turns(View(n, n, causal=True)) for n in (1, 4, 8))
    assert turns(View(1)) and not turns(View(64, 64, causal=True))
    assert not turns(View(16, 16, causal=True)), "one tile, of 64 rows"
    scratch = View(4, 8, mask=meta(2, 4, 8, dtype=torch.bool), scratch=True, write_start=4)
    assert turns(scratch, cap=8)
    wide = View(16, 32, mask=meta(2, 16, 32, dtype=torch.bool), scratch=True, write_start=16)
    assert not turns(wide, cap=32)


# Compilation


def meta(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def launch_plan(
    shape: AttentionShape, view: View, info: DeviceInfo, itemsize: int = 2, cap: int = 0
) -> DecodePlan:
    workspace = DecodeWorkspace(shape, torch.device("meta"), itemsize, info)
    slots, table = meta(16, dtype=torch.int64), meta(17, 8192, dtype=torch.int32)
    return workspace.plan(slots, slots, table, view, cap)


def launch_of(
    shape: AttentionShape,
    view: View,
    norms: bool,
    info: DeviceInfo,
    kv_dtype: torch.dtype = torch.bfloat16,
    sinks: torch.Tensor | None = None,
) -> tuple[Launch, DecodePlan]:
    cap = view.extra if view.scratch else 0
    plan = launch_plan(shape, view, info, kv_dtype.itemsize, cap)
    d, num_tokens = shape.head_dim, 16 * view.query_len
    heads = shape.num_heads + (2 * shape.num_kv_heads if view.writes else 0)
    angles = RopeTables(meta(9000, d, dtype=torch.float32), meta(9000, d, dtype=torch.float32))
    turn = Turn(
        meta(num_tokens, heads * d),
        angles,
        meta(num_tokens, dtype=torch.int64),
        HeadNorms(meta(d), meta(d), 1e-6) if norms else None,
        pdl=True,
    )
    kv, out = meta(100_000, shape.num_kv_heads, 2, d, dtype=kv_dtype), meta(num_tokens, shape.num_heads, d)
    scale = meta(shape.num_kv_heads, 2, dtype=torch.float32) if kv_dtype.itemsize == 1 else None
    scratch = meta(16, cap, *kv.shape[1:], dtype=kv_dtype) if cap else None
    return decode_launch(None, kv, out, plan, scale, scratch, turn, sinks), plan


def views(query_len: int) -> list[View]:
    causal = View(query_len, query_len, causal=True)
    if query_len == 1:
        return [causal, View(1)]
    found = [causal, View(query_len, query_len, mask=meta(16, query_len, query_len, dtype=torch.bool))]
    if query_len == 4:  # the second level of a draft tree
        found.append(View(4, 8, mask=meta(16, 4, 8, dtype=torch.bool), scratch=True, write_start=4))
    return found


def test_other_heads_and_caches_fit() -> None:
    causal = View(4, 4, causal=True)
    for shape, norms in ((AttentionShape(32, 8, 96, 16), False), (AttentionShape(32, 8, 80, 64), True)):
        check(launch_of(shape, causal, norms, H200)[0])
    check(launch_of(LLAMA_8B, causal, True, H200, torch.float8_e4m3fn)[0])
    assert not can_turn(launch_plan(AttentionShape(8, 1, 256, 1), causal, H200))


FITS = {
    f"{name}-sm_{info.arch}": (shape, norms, info)
    for info in (H200, RTX_PRO_6000)
    for name, shape, norms in (
        ("llama_8b", LLAMA_8B, False),
        ("smollm2", SMOLLM2, False),
        ("qwen3", QWEN3, True),
    )
}
LONG_FITS = ("smollm2-sm_120", "qwen3-sm_90")  # the ordinary run has these shapes on the other device


@pytest.mark.parametrize(
    ("shape", "norms", "info"),
    [
        pytest.param(*case, id=name, marks=[pytest.mark.long] if name in LONG_FITS else [])
        for name, case in FITS.items()
    ],
)
def test_fits_beside_another_program(shape: AttentionShape, norms: bool, info: DeviceInfo) -> None:
    for query_len in (1, 4, 8):
        # Drafters, whose levels lie in scratch places, norm no heads.
        for view in views(query_len)[: 2 if norms else None]:
            launch, plan = launch_of(shape, view, norms, info)
            assert can_turn(plan)
            (made,) = check(launch, archs=(info.arch,))
            assert made.shared <= 101_376
            assert made.programs_per_sm(launch.num_warps) >= max(2, plan.config.programs_per_sm)
            check_order(made)


@pytest.mark.long
@pytest.mark.parametrize("info", [H200, RTX_PRO_6000], ids=lambda info: f"sm_{info.arch}")
@pytest.mark.parametrize("shape", [AttentionShape(64, 8, 64, 1), QWEN3], ids=["gpt_oss", "mistral"])
def test_windows_and_sinks_fit(shape: AttentionShape, info: DeviceInfo) -> None:
    for query_len in (1, 4):
        for view in views(query_len)[: min(query_len, 2)]:
            sinks = meta(shape.num_heads) if shape.head_dim == 64 else None
            launch, plan = launch_of(shape, replace(view, window=128), False, info, sinks=sinks)
            assert can_turn(plan)
            (made,) = check(launch, archs=(info.arch,))
            assert made.programs_per_sm(launch.num_warps) >= plan.config.programs_per_sm


def check_order(made: Compiled) -> None:
    """The wait for the kernel ahead comes before any access; K and V are filled in 16-byte pieces."""
    before, after = made.ptx.split("griddepcontrol.wait", 1)
    assert "ld.global" not in before and "griddepcontrol.launch_dependents" in before
    assert "cp.async" not in before and "st.global" not in before
    assert "0x10" in set(re.findall(r"cp\.async\.c[ag]\.shared\.global.*?(0x\w+),", after))
    # Rope's products are rounded as in the kernel of its own, whatever the compiler would choose.
    assert "fma.rn.f32" in after


def test_loads_come_before_what_waits_for_them() -> None:
    """Everything that the turn reads is asked for ahead of the first conditional write."""
    made = compile_launch(launch_of(LLAMA_8B, View(4, 4, causal=True), False, H200)[0], 90)
    early = made.ttgir[: made.ttgir.index("gpu.barrier")]
    early = early[: early.rindex("scf.if")]
    # 5 fields of the item, base, places of a block, positions, q twice, k twice, v, positions and places of
    # the new, cos and sin
    assert early.count("tt.load") == 17
    assert "ttg.local_alloc" not in early


def test_a_plan_with_pdl_keeps_it() -> None:
    launch, plan = launch_of(LLAMA_8B, View(1, 1, causal=True), False, H200)
    assert launch.pdl and launch.constants["PDL"] and not plan.pdl
    replaced = replace(plan, pdl=True)
    turn = Turn(meta(16, 48 * 128), RopeTables(meta(9, 128), meta(9, 128)), meta(16, dtype=torch.int64))
    out = meta(16, 32, 128)
    assert decode_launch(None, meta(9, 8, 2, 128), out, replaced, None, None, turn).pdl
    assert not decode_launch(None, meta(9, 8, 2, 128), out, plan, None, None, turn).pdl

"""Latent attention: the reference against a loop, kernels against the reference, compiled at real shapes."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

from sgl_kernel._dispatch import H200, RTX_PRO_6000, DeviceInfo
from sgl_kernel.attention import DecodePlan, View, plan_decode
from sgl_kernel.attention.mla.op import (
    LatentWorkspace,
    latent_attention,
    latent_launch,
    write_latents,
    write_launch,
)
from sgl_kernel.attention.mla.reference import latent_attention_ref, write_latents_ref
from sgl_kernel.testing.compile_gate import Compiled, check
from sgl_kernel.testing.interpret import interpret

SMALL = DeviceInfo(arch=120, num_sms=20)  # few programs: a row of 700 places is split, not more
R, ROPE = 512, 64  # of every released model
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class World:
    """A random paged cache of latents: NaN wherever a row must not look."""

    num_heads: int
    latent_dim: int
    rope_dim: int
    page_size: int
    slots: torch.Tensor  # [R] int64, 0: padding
    base_lens: torch.Tensor  # [R] int64
    page_table: torch.Tensor  # [slots, max_pages] int32
    latents: torch.Tensor  # [places, R + r]
    generator: torch.Generator

    def draw(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self.generator)

    def places(self, slot: int, positions: torch.Tensor) -> torch.Tensor:
        size = self.page_size
        return self.page_table[slot, positions // size].to(torch.int64) * size + positions % size

    def plan(self, view: View, info: DeviceInfo = SMALL) -> DecodePlan:
        shape = (self.num_heads, self.latent_dim, self.page_size)
        workspace = LatentWorkspace(*shape, torch.device("cpu"), 4, info)
        return plan_decode(workspace, self.slots, self.base_lens, self.page_table, view)


def world(shape: tuple[int, int, int, int], lens: list[int], room: int, seed: int = 0) -> World:
    """shape: heads, R, r, page size. A length of 0 makes a row padding."""
    num_heads, latent_dim, rope_dim, size = shape
    generator = torch.Generator().manual_seed(seed)
    max_pages = -(-(max(lens) + room) // size)
    pages = torch.randperm(len(lens) * max_pages, generator=generator) + 1
    table = torch.zeros(len(lens) + 1, max_pages, dtype=torch.int32)
    table[1:] = pages.view(len(lens), max_pages).to(torch.int32)
    latents = torch.full(((len(lens) * max_pages + 1) * size, latent_dim + rope_dim), torch.nan)
    base_lens = torch.tensor(lens)
    slots = torch.where(base_lens > 0, torch.arange(1, len(lens) + 1), 0)
    made = World(num_heads, latent_dim, rope_dim, size, slots, base_lens, table, latents, generator)
    for slot, length in enumerate(lens, start=1):
        latents[made.places(slot, torch.arange(length))] = made.draw(length, latent_dim + rope_dim)
    return made


def tree_mask(made: World, num: int) -> torch.Tensor:
    """[R, num, num]: random, each query sees itself."""
    mask = torch.rand(len(made.slots), num, num, generator=made.generator) < 0.4
    return mask | torch.eye(num, dtype=torch.bool)


def compare(made: World, view: View, info: DeviceInfo = SMALL, layers: int = 1) -> DecodePlan:
    """New latents written, then attention, by kernels and by their references."""
    plan = made.plan(view, info)
    width, tokens = made.latent_dim + made.rope_dim, len(made.slots) * view.query_len
    scale = width**-0.5
    for _ in range(layers):
        cache, expected_cache = made.latents.clone(), made.latents.clone()
        if view.writes:
            new, of_tokens = made.draw(tokens, width), made.slots.repeat_interleave(view.query_len)
            write_latents(new, of_tokens, plan.places, cache, made.latent_dim)
            write_latents_ref(new, of_tokens, plan.places, expected_cache, made.latent_dim, None)
            assert torch.equal(cache.nan_to_num(7), expected_cache.nan_to_num(7))
        q = made.draw(tokens, made.num_heads + 1, width)[:, : made.num_heads]
        got = latent_attention(q, cache, plan, scale)
        assert got.isfinite().all()
        torch.testing.assert_close(
            got, latent_attention_ref(q, cache, plan, scale, None), rtol=2e-5, atol=2e-5
        )
        assert not plan.counters.any()
    return plan


def body_shapes() -> None:
    """Heads, widths and page sizes; one query and several, causal and by a mask, one tile and more."""
    for shape in ((3, 48, 8, 16), (40, 16, 16, 3)):
        compare(world(shape, [33, 0, 1], 4), View(1, 1, causal=True))
    made = world((6, 32, 16, 1), [0, 70], 64)
    compare(made, View(4, 4, causal=True), layers=2)
    compare(made, View(6, 6, mask=tree_mask(made, 6)))
    compare(made, View(2, 0))


def body_most_queries() -> None:
    """64 queries by a mask, and by order."""
    made = world((2, 32, 16, 16), [60, 9], 64)
    compare(made, View(64, 64, mask=tree_mask(made, 64)))
    compare(made, View(64, 64, causal=True))


def body_splits() -> None:
    """Rows of one chunk and of several, merged at once and in levels."""
    plan = compare(world((4, 32, 16, 1), [1250, 20, 200], 4), View(2, 2, causal=True))
    counts = plan.items[plan.items[:, 0] >= 0, 6]
    assert set(counts.tolist()) > {1} and counts.max() > plan.config.fan_in


def body_broken() -> None:
    """A token that is not finite breaks the queries that see it, whichever of its numbers it is."""
    made = world((2, 32, 16, 1), [40, 30], 4)
    plan = made.plan(View(4, 4, causal=True))
    for column in (3, 40):
        new, cache = made.draw(8, 48), made.latents.clone()
        new[2, column] = torch.inf
        write_latents(new, made.slots.repeat_interleave(4), plan.places, cache, 32)
        q = made.draw(8, 2, 48)
        got = latent_attention(q, cache, plan, 0.2)
        assert got.isnan().flatten(1).any(1).tolist() == [False, False, True, True] + [False] * 4
        expected = latent_attention_ref(q, cache, plan, 0.2, None)
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5, equal_nan=True)


def body_fp8() -> None:
    """An e4m3 cache with a scale for latents and one for turned keys."""
    made, scale = world((4, 32, 16, 1), [60, 33], 4), torch.tensor([2.0**-5, 2.0**-6])
    plan = made.plan(View(2, 2, causal=True))
    cache = (made.latents * 20).nan_to_num(0).to(FP8)
    # What the cache can hold exactly: the interpreter drops a carry when it rounds to e4m3.
    stored = (made.draw(4, 48) * 20).to(FP8)
    new = stored.float() * scale.repeat_interleave(torch.tensor([32, 16]))
    new[1, 5] = 1000.0  # more than it can
    write_latents(new, made.slots.repeat_interleave(2), plan.places, cache, 32, scale)
    stored[1, 5] = 448.0
    assert torch.equal(cache[plan.places].float(), stored.float())
    q = made.draw(4, 4, 48)
    got = latent_attention(q, cache, plan, 0.1, scale)
    torch.testing.assert_close(got, latent_attention_ref(q, cache, plan, 0.1, scale), rtol=2e-5, atol=2e-5)


def body_all(names: list[str]) -> None:
    for name in names:
        globals()[f"body_{name}"]()


def test_kernels_equal_references() -> None:
    interpret(__file__, "body_all", names=["shapes", "splits", "broken", "fp8"])


@pytest.mark.long
def test_the_most_queries() -> None:
    interpret(__file__, "body_all", names=["most_queries"])


def test_the_reference_equals_keys_and_values_made_of_latents() -> None:
    """Absorbed attention is attention over keys and values that each head makes of the latents."""
    made = world((3, 8, 4, 1), [6, 9], 2)
    plan = made.plan(View(2, 2, causal=True))
    cache = made.latents.double()
    new = made.draw(4, 12).double()
    write_latents(new, made.slots.repeat_interleave(2), plan.places, cache, 8)
    to_key, to_value = made.draw(3, 5, 8).double(), made.draw(3, 7, 8).double()  # [nq, n or v, R]
    q_nope, q_rope = made.draw(4, 3, 5).double(), made.draw(4, 3, 4).double()
    q = torch.cat((torch.einsum("tqn,qnr->tqr", q_nope, to_key), q_rope), dim=-1)
    out = torch.einsum("tqr,qvr->tqv", latent_attention(q, cache, plan, 0.3), to_value)
    for token in range(4):
        row, seen = token // 2, int(made.base_lens[token // 2]) + token % 2 + 1
        own = cache[made.places(row + 1, torch.arange(seen))]
        for head in range(3):
            keys = torch.cat((own[:, :8] @ to_key[head].T, own[:, 8:]), dim=1)
            scores = keys @ torch.cat((q_nope[token, head], q_rope[token, head])) * 0.3
            expected = scores.softmax(0) @ (own[:, :8] @ to_value[head].T)
            torch.testing.assert_close(out[token, head], expected)


# ---- compiled for GPUs ----------------------------------------------------------------------------


def meta(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def compiled(
    num_heads: int, query_len: int, info: DeviceInfo, page_size: int = 1, dtype: torch.dtype = torch.bfloat16,
    tree: bool = False,
) -> Compiled:  # fmt: skip
    rows = 16
    workspace = LatentWorkspace(num_heads, R, page_size, torch.device("meta"), dtype.itemsize, info, pdl=True)
    mask = meta(rows, query_len, query_len, dtype=torch.bool) if tree else None
    view = View(query_len, query_len, causal=not tree, mask=mask)
    of_rows, table = meta(rows, dtype=torch.int64), meta(rows + 1, 8192, dtype=torch.int32)
    plan = workspace.plan(of_rows, of_rows, table, view, 0)
    tokens = rows * query_len
    q, out = meta(tokens, num_heads, R + ROPE), meta(tokens, num_heads, R)
    scale = meta(2, dtype=torch.float32) if dtype == FP8 else None
    launch = latent_launch(q, meta(100_000, R + ROPE, dtype=dtype), out, plan, 192**-0.5, scale)
    (made,) = check(launch, archs=(info.arch,))
    print(
        f"{num_heads} heads Q={query_len} {dtype} page {page_size} sm_{info.arch}: {made.shared} bytes,"
        f" {made.registers} registers, {made.programs_per_sm(launch.num_warps)} programs a SM"
    )
    assert made.programs_per_sm(launch.num_warps) >= plan.config.programs_per_sm, "a step is one wave"
    return made


DEVICES = pytest.mark.parametrize("info", [H200, RTX_PRO_6000], ids=lambda info: f"sm_{info.arch}")


@DEVICES
def test_fits_and_loads_latents_once(info: DeviceInfo) -> None:
    """8 heads are those of Kimi-K2.5 or GLM-5 as one of 8 ranks has them."""
    made = compiled(8, 4, info)
    # One buffer of latents serves keys and values; two are in flight, filled in pieces of up to 16 bytes.
    buffers = re.findall(r"ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x(\d+)x(\d+)x", made.ttgir)
    assert sorted((int(width), int(count)) for count, _, width in buffers) == [(ROPE, 2), (R, 2)], buffers
    assert "0x10" in set(re.findall(r"cp\.async\.c[ag]\.shared\.global.*?(0x\w+),", made.ptx))


@pytest.mark.long
@DEVICES
@pytest.mark.parametrize("num_heads", [8, 16, 20, 32, 64, 128])
def test_all_sizes_fit(num_heads: int, info: DeviceInfo) -> None:
    for query_len in (1, 2, 4, 8, 64):
        compiled(num_heads, query_len, info)
    compiled(num_heads, 16, info, tree=True)
    compiled(num_heads, 64, info, page_size=64, tree=True)
    compiled(num_heads, 4, info, dtype=FP8)


def test_more_levels_of_merging_than_a_group_has_counters_are_refused() -> None:
    """257 chunks in groups of 4 take 5 levels: a counter would be another group's."""
    workspace = LatentWorkspace(8, R, 1, torch.device("meta"), 2, H200)
    workspace = LatentWorkspace(
        8, R, 1, torch.device("meta"), 2, H200, config=replace(workspace.usual_config(1), fan_in=4)
    )
    rows, table = meta(2, dtype=torch.int64), meta(3, 64, dtype=torch.int32)
    plan = workspace.plan(rows, rows, table, View(1), 0)
    with pytest.raises(AssertionError, match="need a larger fan_in"):
        latent_launch(meta(2, 8, R + ROPE), meta(64, R + ROPE), meta(2, 8, R), plan, 1.0, None)


def test_writes_fit() -> None:
    of_tokens = meta(64, dtype=torch.int64)
    pool, scale = meta(1000, R + ROPE, dtype=FP8), meta(2, dtype=torch.float32)
    check(write_launch(meta(64, R + ROPE), of_tokens, of_tokens, pool, R, scale, True), archs=(120,))

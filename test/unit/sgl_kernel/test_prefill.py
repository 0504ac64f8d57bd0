"""Prefill attention and the KV write: in the interpreter against the references, and compiled."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

from helpers.paged_world import paged_world

from sgl_kernel._dispatch import H200, RTX_PRO_6000, DeviceInfo
from sgl_kernel.attention import AttentionShape, PrefillPlan, plan_prefill, prefill_attention, store_kv
from sgl_kernel.attention.prefill.op import prefill_attention_ref, prefill_config, prefill_launch
from sgl_kernel.attention.store.op import store_kv_ref
from sgl_kernel.testing.compile_gate import check
from sgl_kernel.testing.interpret import interpret

SMALL_TILES = DeviceInfo(arch=120, num_sms=4)


def body_prefill() -> None:
    """First and later chunks of several lengths, of groups and head sizes that fill no tile evenly."""
    for heads, kv_heads, dim, page in [(4, 1, 64, 1), (9, 3, 64, 16), (2, 2, 80, 5), (8, 1, 256, 1)]:
        shape = AttentionShape(heads, kv_heads, dim, page)
        world = paged_world(shape, [40, 70, 33], 50)
        slots = tuple(world.slots.tolist())
        plan = plan_prefill(shape, world.page_table, slots, (0, 70, 33), (45, 1, 20), 4, SMALL_TILES)
        k, v = world.draw(66, kv_heads, dim), world.draw(66, kv_heads, dim)
        store_kv(k, v, world.kv, plan.places)
        q = world.draw(66, heads + 2, dim)[:, :heads]
        got, expected = prefill_attention(q, world.kv, plan), prefill_attention_ref(q, world.kv, plan, None)
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)
        longest_first = [start + row // shape.group for _, start, _, _, row, *_ in plan.tiles.tolist()]
        assert longest_first == sorted(longest_first, reverse=True)


def body_store() -> None:
    """Slices of a fused projection, both kinds of cache, values that are not finite or too large."""
    generator = torch.Generator().manual_seed(0)
    for heads, dim in ((3, 64), (2, 80)):
        qkv = torch.randn(7, 4 * heads, dim, generator=generator)
        places = torch.randperm(20, generator=generator)[:7]
        k, v = qkv[:, 2 * heads : 3 * heads], qkv[:, 3 * heads :]
        v[1, 0, 5], v[2, -1, 0], k[3, 0, 1], v[4, -1, 2] = torch.nan, torch.inf, torch.nan, 1e4
        got, expected = torch.zeros(2, 20, heads, 2, dim)
        store_kv(k, v, got, places)
        store_kv_ref(k, v, expected, places, None)
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
        # The interpreter rounds to e4m3 wrongly where a mantissa overflows, and has no NaN of it: so
        # take numbers that need no rounding.
        scale = torch.tensor([[0.5, 0.25], [2.0, 1.0], [0.125, 4.0]])[:heads]
        k.copy_(torch.randn(k.shape, generator=generator).to(torch.float8_e4m3fn).float() * scale[:, :1])
        v.copy_(torch.randn(v.shape, generator=generator).to(torch.float8_e4m3fn).float() * scale[:, 1:])
        v[4, -1, 2], k[5, 0, 0] = 1e4, -1e4
        got, expected = torch.zeros(2, 20, heads, 2, dim).to(torch.float8_e4m3fn)
        store_kv(k, v, got, places, scale)
        store_kv_ref(k, v, expected, places, scale)
        assert torch.equal(got.float(), expected.float())
        assert got[places[4], -1, 1, 2].float() == 448 and got[places[5], 0, 0, 0].float() == -448


@pytest.mark.parametrize("body", ["prefill", "store"])
def test_kernel_equals_reference(body: str) -> None:
    interpret(__file__, f"body_{body}")


def meta(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


CASES = [
    (AttentionShape(32, 8, 128, 1), torch.bfloat16),
    (AttentionShape(9, 3, 64, 1), torch.bfloat16),
    (AttentionShape(32, 8, 128, 1), torch.float8_e4m3fn),
    (AttentionShape(16, 2, 256, 16), torch.bfloat16),
]


@pytest.mark.parametrize("info", [H200, RTX_PRO_6000], ids=lambda info: f"sm_{info.arch}")
@pytest.mark.parametrize("shape,kv_dtype", CASES, ids=["llama_8b", "smollm2", "llama_8b_fp8", "d256"])
def test_fits(shape: AttentionShape, kv_dtype: torch.dtype, info: DeviceInfo) -> None:
    config = prefill_config(info.arch, shape.head_dim, kv_dtype.itemsize)
    table, tiles = meta(17, 8192, dtype=torch.int32), meta(128, 8, dtype=torch.int32)
    plan = PrefillPlan(
        shape, config, (), (), (), table, tiles, meta(1024, dtype=torch.int64), meta(1024, dtype=torch.int64)
    )
    qkv = meta(1024, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
    kv = meta(100_000, shape.num_kv_heads, 2, shape.head_dim, dtype=kv_dtype)
    scale = meta(shape.num_kv_heads, 2, dtype=torch.float32) if kv_dtype.itemsize == 1 else None
    out = meta(1024, shape.num_heads, shape.head_dim)
    launch = prefill_launch(qkv[:, : shape.num_heads], kv, out, plan, scale)
    (made,) = check(launch, archs=(info.arch,))
    print(
        f"prefill {shape} {kv_dtype} sm_{info.arch}: {made.shared} bytes, {made.registers} registers,"
        f" {made.programs_per_sm(launch.num_warps)} programs a SM"
    )
    assert ("warp_group_dot" in made.ttgir) == (info.arch == 90)

"""Prefill attention: in the interpreter against its reference, and compiled."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

from helpers.paged_world import paged_world, store_kv

from sgl_kernel._dispatch import H200, RTX_PRO_6000, DeviceInfo
from sgl_kernel.attention import AttentionShape, PrefillPlan, plan_prefill, prefill_attention
from sgl_kernel.attention.prefill.op import prefill_attention_ref, prefill_config, prefill_launch
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
        if dim == 64:
            window, sinks = (3 if kv_heads == 1 else 37), world.draw(heads)
            got = prefill_attention(q, world.kv, plan, window=window, sinks=sinks)
            expected = prefill_attention_ref(q, world.kv, plan, None, window, sinks)
            torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)
        longest_first = [start + row // shape.group for _, start, _, _, row, *_ in plan.tiles.tolist()]
        assert longest_first == sorted(longest_first, reverse=True)


def test_kernel_equals_reference() -> None:
    interpret(__file__, "body_prefill")


def meta(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


CASES = {
    "llama_8b": (AttentionShape(32, 8, 128, 1), torch.bfloat16, 0),
    "smollm2": (AttentionShape(9, 3, 64, 1), torch.bfloat16, 0),
    "llama_8b_fp8": (AttentionShape(32, 8, 128, 1), torch.float8_e4m3fn, 0),
    "d256": (AttentionShape(16, 2, 256, 16), torch.bfloat16, 0),
    "gpt_oss": (AttentionShape(64, 8, 64, 1), torch.bfloat16, 128),
    "mistral": (AttentionShape(32, 8, 128, 16), torch.bfloat16, 4096),
}
LONG = {"gpt_oss", "mistral"}


@pytest.mark.parametrize("info", [H200, RTX_PRO_6000], ids=lambda info: f"sm_{info.arch}")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if name in LONG else []) for name in CASES]
)
def test_fits(name: str, info: DeviceInfo) -> None:
    shape, kv_dtype, window = CASES[name]
    config = prefill_config(info.arch, shape.head_dim, kv_dtype.itemsize)
    table, tiles = meta(17, 8192, dtype=torch.int32), meta(128, 8, dtype=torch.int32)
    plan = PrefillPlan(
        shape, config, (), (), (), table, tiles, meta(1024, dtype=torch.int64), meta(1024, dtype=torch.int64)
    )
    qkv = meta(1024, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
    kv = meta(100_000, shape.num_kv_heads, 2, shape.head_dim, dtype=kv_dtype)
    scale = meta(shape.num_kv_heads, 2, dtype=torch.float32) if kv_dtype.itemsize == 1 else None
    out = meta(1024, shape.num_heads, shape.head_dim)
    sinks = meta(shape.num_heads) if name == "gpt_oss" else None
    launch = prefill_launch(qkv[:, : shape.num_heads], kv, out, plan, scale, window, sinks)
    (made,) = check(launch, archs=(info.arch,))
    print(
        f"prefill {shape} {kv_dtype} sm_{info.arch}: {made.shared} bytes, {made.registers} registers,"
        f" {made.programs_per_sm(launch.num_warps)} programs a SM"
    )
    assert ("warp_group_dot" in made.ttgir) == (info.arch == 90)

"""Decode attention compiled for sm_90 and sm_120 at real shapes: it fits, spills nothing, is pipelined."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

from sgl_kernel._dispatch import H200, RTX_PRO_6000, DeviceInfo
from sgl_kernel.attention import AttentionShape, DecodePlan, DecodeWorkspace, View
from sgl_kernel.attention.decode.config import decode_config
from sgl_kernel.attention.decode.op import decode_launch
from sgl_kernel.attention.decode.plan import plan_launch
from sgl_kernel.testing.compile_gate import Compiled, check

LLAMA_8B = AttentionShape(32, 8, 128, 1)
QWEN3 = AttentionShape(32, 8, 128, 16)
SMOLLM2 = AttentionShape(9, 3, 64, 1)
GPT_OSS = AttentionShape(64, 8, 64, 1)
GLM_RANK = AttentionShape(12, 1, 128, 64)  # GLM-4.5 over 8 ranks
DEVICES = (H200, RTX_PRO_6000)


def meta(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def plan(
    shape: AttentionShape, view: View, info: DeviceInfo, itemsize: int = 2, rows: int = 16, cap: int = 0
) -> DecodePlan:
    workspace = DecodeWorkspace(shape, torch.device("meta"), itemsize, info, pdl=True)
    table = meta(rows + 1, 8192, dtype=torch.int32)
    return workspace.plan(meta(rows, dtype=torch.int64), meta(rows, dtype=torch.int64), table, view, cap)


def compiled(
    shape: AttentionShape,
    view: View,
    kv_dtype: torch.dtype,
    info: DeviceInfo,
    cap: int = 0,
    sinks: torch.Tensor | None = None,
) -> tuple[Compiled, DecodePlan]:
    made = plan(shape, view, info, kv_dtype.itemsize, cap=cap)
    tokens = len(made.slots) * view.query_len
    # q is a slice of a fused qkv projection, as a model passes it
    qkv = meta(tokens, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
    kv = meta(100_000, shape.num_kv_heads, 2, shape.head_dim, dtype=kv_dtype)
    scratch = meta(16, cap, *kv.shape[1:], dtype=kv_dtype) if cap else None
    scale = meta(shape.num_kv_heads, 2, dtype=torch.float32) if kv_dtype.itemsize == 1 else None
    out = meta(tokens, shape.num_heads, shape.head_dim)
    launch = decode_launch(qkv[:, : shape.num_heads], kv, out, made, scale, scratch, sinks=sinks)
    (result,) = check(launch, archs=(info.arch,))
    print(
        f"{shape} Q={view.query_len} {kv_dtype} sm_{info.arch}: {result.shared} bytes,"
        f" {result.registers} registers, {result.programs_per_sm(launch.num_warps)} programs a SM"
    )
    return result, made


def views(query_len: int) -> list[View]:
    causal = View(query_len, query_len, causal=True)
    if query_len != 16:
        return [causal]
    return [causal, View(query_len, query_len, mask=meta(16, query_len, query_len, dtype=torch.bool))]


@pytest.mark.parametrize("info", DEVICES, ids=lambda info: f"sm_{info.arch}")
@pytest.mark.parametrize("shape", [LLAMA_8B, SMOLLM2], ids=["llama_8b", "smollm2"])
@pytest.mark.parametrize("query_len", [1, 2, 4, 16, 64])
def test_fits_and_is_pipelined(query_len: int, shape: AttentionShape, info: DeviceInfo) -> None:
    for view in views(query_len):
        made, decode_plan = compiled(shape, view, torch.bfloat16, info)
        config = decode_plan.config
        assert made.programs_per_sm(config.num_warps) >= config.programs_per_sm, "a step is one wave"
        # K and V have num_stages - 1 buffers each (one more for wgmma, which reads them late), filled in
        # 16-byte pieces, and nothing else has any: the page table's load takes no stage.
        late = "warp_group_dot" in made.ttgir
        buffers = re.findall(r"ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x(\d+)x", made.ttgir)
        assert buffers == [(str(config.num_stages - 1 + late), str(config.block_n))] * 2, buffers
        assert set(re.findall(r"cp\.async\.c[ag]\.shared\.global.*?(0x\w+),", made.ptx)) == {"0x10"}


@pytest.mark.parametrize("info", DEVICES, ids=lambda info: f"sm_{info.arch}")
def test_windows_and_sinks_fit(info: DeviceInfo) -> None:
    view = View(4, 4, causal=True, window=128)
    made, decode_plan = compiled(GPT_OSS, view, torch.bfloat16, info, sinks=meta(64))
    config = decode_plan.config
    assert made.programs_per_sm(config.num_warps) >= config.programs_per_sm, "a step is one wave"


@pytest.mark.long
@pytest.mark.parametrize("info", DEVICES, ids=lambda info: f"sm_{info.arch}")
@pytest.mark.parametrize("shape", [GPT_OSS, QWEN3], ids=["gpt_oss", "mistral"])
def test_other_windows_fit(shape: AttentionShape, info: DeviceInfo) -> None:
    for view in (*views(16), *views(1), *views(8), View(1)):
        compiled(shape, replace(view, window=128), torch.bfloat16, info, sinks=meta(shape.num_heads))
    mask = meta(16, 4, 12, dtype=torch.bool)
    view = View(4, 12, mask=mask, scratch=True, write_start=8, window=128)
    compiled(shape, view, torch.bfloat16, info, cap=16)


def test_shapes_that_spilled() -> None:
    for view in views(16):
        compiled(QWEN3, view, torch.bfloat16, H200)
    compiled(SMOLLM2, View(8, 8, causal=True), torch.bfloat16, RTX_PRO_6000)
    compiled(GLM_RANK, View(4, 4, mask=meta(16, 4, 4, dtype=torch.bool)), torch.bfloat16, RTX_PRO_6000)


@pytest.mark.parametrize("page_size", [1, 16])
def test_llama_keeps_what_was_measured(page_size: int) -> None:
    for rows, blocks in ((4, (16, 32)), (16, (16, 32)), (64, (64, 64 if page_size == 1 else 32))):
        config = decode_config(90, rows, 128, 2, page_size)
        assert (config.block_m, config.block_n) == blocks
        assert (config.num_warps, config.num_stages) == (8 if rows == 64 else 4, 3)
        assert (config.programs_per_sm, config.max_registers) == (2, 128)


@pytest.mark.parametrize("info", DEVICES, ids=lambda info: f"sm_{info.arch}")
def test_other_caches_and_heads_fit(info: DeviceInfo) -> None:
    fp8 = torch.float8_e4m3fn
    compiled(LLAMA_8B, View(4, 4, causal=True), fp8, info)
    compiled(AttentionShape(32, 8, 96, 16), View(1, 1, causal=True), torch.bfloat16, info)
    compiled(AttentionShape(32, 8, 80, 64), View(4, 4, causal=True), torch.bfloat16, info)
    compiled(AttentionShape(16, 1, 256, 1), View(16, 16, causal=True), torch.bfloat16, info)
    mask = meta(16, 8, 80, dtype=torch.bool)
    compiled(LLAMA_8B, View(8, 80, mask=mask, scratch=True, write_start=72), torch.bfloat16, info, cap=96)


def test_plans_fit() -> None:
    for rows, view in ((1, View(1, 1, causal=True)), (512, View(4, 4, causal=True))):
        check(plan_launch(plan(LLAMA_8B, view, H200, rows=rows)))
    mask = meta(16, 16, 16, dtype=torch.bool)
    check(plan_launch(plan(SMOLLM2, View(16, 16, mask=mask), H200)))
    check(plan_launch(plan(GPT_OSS, View(16, 16, mask=mask, window=128), H200)))

"""Norms, activation, rope with cache write: references against the CPU server's own code, kernels against
references in the interpreter, compilation at real shapes."""

from __future__ import annotations

import pytest
import torch

from sgl_kernel.activation.ops import silu_and_mul, silu_and_mul_launch, silu_and_mul_ref
from sgl_kernel.norm.ops import rms_norm, rms_norm_launch, rms_norm_ref
from sgl_kernel.rope.ops import (
    CachePlaces,
    HeadNorms,
    RopeTables,
    TokenRows,
    rope_cache_write,
    rope_cache_write_ref,
    rope_launch,
)
from sgl_kernel.testing.compile_gate import check, compile_launch
from sgl_kernel.testing.interpret import interpret
from sglang.srt.configs.rope_config import RopeConfig
from sglang.srt.layers.norm import RMSNorm
from sglang.srt.layers.rope import Rope
from sglang.srt.mem_cache.kv_pool import MHAKVPool

BF16 = torch.bfloat16


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """The interpreter truncates where it makes bfloat16: up to a unit (2**-7) for each of three roundings."""
    tolerance = {BF16: 2**-5, torch.float16: 2**-9, torch.float8_e4m3fn: 2**-3}.get(wanted.dtype, 1e-5)
    got, wanted = got.float(), wanted.float()
    if tolerance == 2**-3:
        # The interpreter drops the carry into a float8's exponent: 1.97 becomes 1, not 2.
        whole = wanted.abs().frexp().mantissa == 0.5
        assert whole.float().mean() < 0.9
        got = torch.where(whole, wanted, got)
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance / 4, equal_nan=True)


# References against the server's code


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_norms_mean_what_the_models_mean(dtype: torch.dtype) -> None:
    x, w = _random(5, 96, dtype=dtype), _random(96, dtype=dtype, seed=1)
    torch.testing.assert_close(rms_norm(x, w, 1e-5), RMSNorm(w, 1e-5)(x))
    wide = torch.zeros(5, 288, dtype=dtype)
    rms_norm(x, w, 1e-5, out=wide[:, 96:192])
    assert torch.equal(wide[:, 96:192], rms_norm(x, w, 1e-5))
    assert wide[:, :96].any() == wide[:, 192:].any() == False  # noqa: E712


def _rope_case(
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype = torch.float32,
    page_size: int = 4,
    d: int = 16,
) -> tuple[torch.Tensor, RopeTables, CachePlaces, MHAKVPool]:
    """12 tokens of 3 q and 2 kv heads; slots 1 … 3 have pages of their own."""
    rope = Rope(RopeConfig(kind="default", theta=100.0), d, 64, torch.float32, "cpu")
    pool = MHAKVPool(1, 24, page_size, 2, d, torch.float32, "cpu")
    pool.kv.zero_()
    table = torch.zeros(4, 8, dtype=torch.int32)
    table[1:] = torch.randperm(24, generator=torch.Generator().manual_seed(3)).view(3, 8).int() + 1
    kv = pool.layer_kv(0).to(cache_dtype)
    return (
        _random(12, 7 * d, dtype=dtype),
        RopeTables(rope.cos, rope.sin),
        CachePlaces(kv, table, page_size),
        pool,
    )


@pytest.mark.parametrize("page_size", [1, 4])
def test_rope_and_cache_write_are_those_of_the_server(page_size: int) -> None:
    qkv, tables, cache, pool = _rope_case(page_size=page_size)
    slots, root = torch.tensor([2, 1, 3]), torch.tensor([3, 0, 2 if page_size == 1 else 9], dtype=torch.int32)
    rows = TokenRows(slots, root)
    positions = (root[:, None] + torch.arange(4)).reshape(-1)
    qk = qkv.view(12, 7, 16)[:, :5]
    sin = tables.sin[positions][:, None]
    turned = qk * tables.cos[positions][:, None] + qk.roll(8, dims=-1) * sin
    pages = cache.page_table[slots.repeat_interleave(4), positions // page_size]
    pool.write(0, pages.long() * page_size + positions % page_size, turned[:, 3:], qkv.view(12, 7, 16)[:, 5:])
    q_out = torch.empty(12, 3 * 16)
    rope_cache_write(qkv, 3, 2, tables, rows, cache=cache, q_out=q_out)
    torch.testing.assert_close(q_out.view(12, 3, 16), turned[:, :3])
    torch.testing.assert_close(cache.kv, pool.layer_kv(0))


# Kernels against references, in the interpreter


def body_norms() -> None:
    for dtype, size in ((torch.float32, 96), (BF16, 576), (torch.float16, 64)):
        x = _random(3, 2 * size, dtype=dtype)[:, :size]  # rows lie apart
        w = _random(size, dtype=dtype, seed=1)
        wanted = rms_norm_ref(x, w, 1e-5, torch.empty_like(x))
        _close(rms_norm(x, w, 1e-5), wanted)
        _close(rms_norm(x, w, 1e-5, out=x), wanted)
    for dtype in (torch.float32, BF16):
        gate_up = _random(3, 2 * 1500, dtype=dtype)
        wanted_act = silu_and_mul_ref(gate_up, torch.empty(3, 1500, dtype=dtype))
        _close(silu_and_mul(gate_up), wanted_act)


def _run_rope(
    kernel: bool, num_q: int, num_kv: int, case: dict[str, torch.dtype], **options: object
) -> list[torch.Tensor]:
    qkv, tables, cache, _ = _rope_case(**case)
    d = 16
    part = qkv[:, : (num_q + 2 * num_kv) * d].contiguous()
    slots = torch.tensor([2, 0, 3])  # 0 is the pad slot
    root = torch.tensor([3, 1, 9], dtype=torch.int32)
    counts = torch.tensor([4, 4, 2]) if options.get("counts") else None
    if options.get("places"):
        scale = torch.tensor([[2.0, 0.5], [1.0, 4.0]])
        cache = CachePlaces(cache.kv, places=torch.randperm(12) + 20, kv_scale=scale)
        if cache.kv.dtype != torch.float8_e4m3fn:  # the interpreter has no NaN of it
            part[9, -1], part[10, -20] = torch.inf, torch.nan  # values that are not finite
    dtype = part.dtype
    norms = None
    if options.get("norm"):
        norms = HeadNorms(_random(d, dtype=dtype, seed=5), _random(d, dtype=dtype, seed=6), 1e-6)
    q_out = torch.zeros(12, num_q * d, dtype=dtype) if num_q and not options.get("in_place") else None
    rows = TokenRows(slots, root, counts)
    held = cache if num_kv else None
    if kernel:
        rope_cache_write(part, num_q, num_kv, tables, rows, cache=held, norms=norms, q_out=q_out)
    else:
        target = part[:, : num_q * d] if num_q and q_out is None else q_out
        rope_cache_write_ref(part, num_q, num_kv, tables, rows, held, norms, target)
    return [part, cache.kv] + ([q_out] if q_out is not None else [])


def body_rope() -> None:
    f8 = torch.float8_e4m3fn
    bf16 = {"dtype": BF16, "cache_dtype": BF16}
    fp8 = {"dtype": torch.float16, "cache_dtype": f8}
    normed, cut = {"norm": True}, {"counts": True, "in_place": True}
    for num_q, num_kv, case, options in (
        (3, 2, {}, normed),
        (3, 2, bf16, cut),
        (3, 2, fp8, {}),
        (3, 2, fp8, {"places": True}),
        (3, 2, {}, {"places": True}),
        (0, 2, {}, cut),
        (3, 0, bf16, normed),
    ):
        torch.manual_seed(0)
        got = _run_rope(True, num_q, num_kv, case, **options)
        torch.manual_seed(0)
        for g, w in zip(got, _run_rope(False, num_q, num_kv, case, **options), strict=True):
            _close(g, w)
    _, tables, cache, _ = _rope_case(cache_dtype=f8)
    big = torch.full((1, 2 * 2 * 16), 1e4)
    rows = TokenRows(torch.tensor([1]), torch.tensor([0]))
    rope_cache_write(big, 0, 2, tables, rows, cache=cache)
    assert cache.kv.float().abs().max() == 448, "beyond the range: its largest value, never NaN"


def test_norm_and_activation_kernels() -> None:
    pytest.importorskip("triton", reason="kernels need triton")
    interpret(__file__, "body_norms")


def test_rope_kernel() -> None:
    pytest.importorskip("triton", reason="kernels need triton")
    interpret(__file__, "body_rope")


# Compilation


def _meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("size", [4096, 576, 7168, 6144])  # Llama-8B, SmolLM2, Kimi, GLM-5
def test_norms_fit(size: int) -> None:
    pytest.importorskip("triton", reason="kernels need triton")
    x = _meta(4, size)
    check(rms_norm_launch(x, _meta(size), 1e-5, x, pdl=True))


def test_activations_fit() -> None:
    pytest.importorskip("triton", reason="kernels need triton")
    for size in (14336, 1536, 18432):
        check(silu_and_mul_launch(_meta(4, 2 * size), _meta(4, size), pdl=True))


@pytest.mark.parametrize("cache_dtype", [BF16, torch.float8_e4m3fn])
def test_rope_fits(cache_dtype: torch.dtype) -> None:
    pytest.importorskip("triton", reason="kernels need triton")
    for num_q, num_kv, d, norm in (
        (32, 8, 128, False),
        (9, 3, 64, False),
        (32, 8, 128, True),
        (0, 8, 128, False),
    ):
        qkv = _meta(4, (num_q + 2 * num_kv) * d)
        tables = RopeTables(*(_meta(2048, d, dtype=torch.float32) for _ in range(2)))
        rows = TokenRows(
            _meta(1, dtype=torch.int64), _meta(1, dtype=torch.int32), counts=_meta(1, dtype=torch.int64)
        )
        kv = _meta(4096, num_kv, 2, d, dtype=cache_dtype)
        cache = CachePlaces(kv, _meta(64, 2048, dtype=torch.int32), 1)
        norms = HeadNorms(_meta(d), _meta(d), 1e-6) if norm else None
        check(rope_launch(qkv, num_q, num_kv, tables, rows, cache, norms, None, pdl=True))


def test_weights_are_requested_before_the_wait() -> None:
    pytest.importorskip("triton", reason="kernels need triton")
    x, w = _meta(1, 4096), _meta(4096)
    ptx = compile_launch(rms_norm_launch(x, w, 1e-5, x, pdl=True), 90).ptx
    before, after = ptx.split("griddepcontrol.wait", 1)
    assert "ld.global" in before and "ld.global" in after

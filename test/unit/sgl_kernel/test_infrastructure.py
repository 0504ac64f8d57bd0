"""The interpreter helper and the compile gate themselves: they pass what is right and catch what is wrong."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

import triton
import triton.language as tl

from sgl_kernel.launch import Launch
from sgl_kernel.testing.compile_gate import check, compile_launch
from sgl_kernel.testing.interpret import interpret


@triton.jit
def _double_kernel(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)


def _double(x: torch.Tensor, out: torch.Tensor, block: int) -> Launch:
    n = x.numel()
    return Launch(_double_kernel, (-(-n // block),), (x, out, n), {"BLOCK": block}, num_warps=1)


def body_double(n: int, factor: float) -> None:
    x = torch.arange(n, dtype=torch.float32)
    out = torch.empty_like(x)
    _double(x, out, 16).run()
    assert torch.equal(out, x * factor)


def test_bodies_run_in_the_interpreter_and_their_failures_come_back() -> None:
    interpret(__file__, "body_double", n=37, factor=2.0)
    with pytest.raises(AssertionError, match="body_double"):
        interpret(__file__, "body_double", n=37, factor=3.0)


def test_the_gate_specialises_like_the_launcher() -> None:
    """n % 16 == 0 lets the compiler use 16-byte accesses; n = 37 does not."""
    aligned, ragged = (torch.empty(n, device="meta") for n in (4096, 37))
    assert "v4" in compile_launch(_double(aligned, aligned, 128), 90).ptx
    assert "v4" not in compile_launch(_double(ragged, ragged, 128), 90).ptx
    assert [made.arch for made in check(_double(aligned, aligned, 128))] == [90, 120]


def test_spills_are_refused() -> None:
    x = torch.empty(1 << 20, device="meta")
    with pytest.raises(AssertionError, match="spills"):
        check(_double(x, x, 1 << 15), archs=(120,))

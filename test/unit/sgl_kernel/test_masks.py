"""Masks of grammars: the reference against plain bits, and the kernel's compilation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_kernel.sampling.masks.ops import apply_masks, masks_launch
from sgl_kernel.sampling.rows import Depths, NodeRows
from sgl_kernel.testing.compile_gate import check

LOWEST = torch.finfo(torch.float32).min


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    num_rows=st.integers(1, 4),
    num_nodes=st.integers(1, 3),
    vocab=st.integers(1, 70),
    ragged=st.booleans(),
)
def test_what_is_not_allowed_is_lowest(
    seed: int, num_rows: int, num_nodes: int, vocab: int, ragged: bool
) -> None:
    rng = torch.Generator().manual_seed(seed)
    allowed = torch.rand(num_rows, num_nodes, vocab, generator=rng) < 0.5
    has_mask = torch.rand(num_rows, generator=rng) < 0.7
    which = torch.where(has_mask, has_mask.cumsum(0) - 1, -1).to(torch.int32)
    masks = _packed(allowed[has_mask])
    logits = torch.randn(num_rows * num_nodes, vocab, generator=rng)
    logits[0, 0] = torch.nan
    slots = torch.arange(num_rows)
    lines = None
    if ragged:
        lines = torch.arange(num_rows * num_nodes)[torch.rand(num_rows * num_nodes, generator=rng) < 0.7]
        logits = logits[lines]
    before = logits.clone()
    apply_masks(logits, NodeRows(slots, slots, num_nodes, Depths.CHAIN, lines=lines), which, masks)
    for line, number in enumerate(range(num_rows * num_nodes) if lines is None else lines.tolist()):
        row, node = divmod(number, num_nodes)
        for token in range(vocab):
            kept = not has_mask[row] or allowed[row, node, token] or not before[line, token].isfinite()
            wanted = before[line, token] if kept else torch.tensor(LOWEST)
            assert torch.equal(logits[line, token].nan_to_num(1e9), wanted.nan_to_num(1e9))


def _packed(allowed: torch.Tensor) -> torch.Tensor:
    """[G, N, V] bool -> [G, N, words] int32, told by powers of two."""
    words = -(-allowed.shape[-1] // 32)
    padded = torch.nn.functional.pad(allowed, (0, words * 32 - allowed.shape[-1])).to(torch.int64)
    values = (padded.unflatten(-1, (words, 32)) << torch.arange(32)).sum(-1)
    return torch.where(values >= 2**31, values - 2**32, values).to(torch.int32)


@pytest.mark.parametrize("vocab", [128256, 49152, 163840])  # Llama-3, SmolLM2, Kimi
def test_the_kernel_fits(vocab: int) -> None:
    pytest.importorskip("triton", reason="kernels need triton")

    def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    slots = meta(8, dtype=torch.int64)
    rows = NodeRows(slots, slots, 4, Depths.CHAIN)
    which, masks = meta(8, dtype=torch.int32), meta(3, 4, -(-vocab // 32), dtype=torch.int32)
    check(masks_launch(meta(32, vocab, dtype=torch.float32), rows, which, masks, pdl=True))
    some = NodeRows(slots, slots, 4, Depths.CHAIN, lines=meta(20, dtype=torch.int64))
    check(masks_launch(meta(20, vocab, dtype=torch.float32), some, which, masks, pdl=True))

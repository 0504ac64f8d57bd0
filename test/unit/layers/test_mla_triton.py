"""Latent attention over sgl_kernel (its references: no GPU) against the plain PyTorch backend, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.attention_reference import random_page_table
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.layers.attention.base import Block, DecodeRows, PrefillRows
from sglang.srt.layers.attention.mla import LatentHeads, LatentProduct
from sglang.srt.layers.attention.mla_native import TorchNativeMLA
from sglang.srt.layers.attention.mla_triton import TritonMLA
from sglang.srt.mem_cache.mla_pool import MLAKVPool, MLAShape

NQ, NOPE, ROPE, V, RANK = 3, 5, 4, 7, 6
NUM_SLOTS, MAX_LEN, LAYERS = 4, 40, 2


class Both:
    """The two backends over pools of the same latents: NaN where nothing was written."""

    def __init__(self, seed: int, page_size: int, lens: list[int]) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        max_pages = -(-MAX_LEN // page_size)
        num_pages = NUM_SLOTS * max_pages
        table = random_page_table(NUM_SLOTS, max_pages, num_pages, self.generator)
        shape = MLAShape(LAYERS, RANK + ROPE)
        self.pools = [shape.make_pool(num_pages, page_size, torch.float64, "cpu") for _ in range(2)]
        self.native = TorchNativeMLA(self.pools[0], table)
        self.kernels = TritonMLA(self.pools[1], table, NQ, RANK)
        for pool in self.pools:
            pool.poison(range(1, num_pages + 1))
        self.heads = LatentHeads(self.draw(NQ, NOPE + V, RANK), NOPE)
        for slot, length in enumerate(lens, start=1):
            places = self.native.places(torch.full((length,), slot), torch.arange(length))
            for layer in range(LAYERS):
                kept = self.draw(length, RANK + ROPE)
                for pool in self.pools:
                    pool.write(layer, places, kept)

    def draw(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self.generator, dtype=torch.float64)

    def product(self, num: int) -> LatentProduct:
        return LatentProduct(
            self.draw(num, NQ, NOPE), self.draw(num, NQ, ROPE), self.draw(num, RANK + ROPE), self.heads, 0.31
        )

    def same_pools(self) -> bool:
        first, second = (pool.latents[:, pool.page_size :].nan_to_num(9.0) for pool in self.pools)
        return torch.equal(first, second)


@settings(max_examples=12, deadline=None)
@given(
    st.integers(0, 1000),
    st.sampled_from([1, 3, 16]),
    st.lists(st.integers(1, 30), min_size=1, max_size=3),
    st.integers(1, 6),
    st.sampled_from(Block),
)
def test_decode_and_verify(seed: int, page_size: int, lens: list[int], queries: int, block: Block) -> None:
    both = Both(seed, page_size, lens)
    num_rows = len(lens)
    mask = torch.rand(num_rows, queries, queries, generator=both.generator) < 0.5
    mask = mask.tril() | torch.eye(queries, dtype=torch.bool)
    rows = DecodeRows(
        torch.arange(1, num_rows + 1), torch.tensor(lens), max(lens) + 2, queries, block,
        mask if block is Block.TREE else None,
    )  # fmt: skip
    native, kernels = both.native.decode(rows), both.kernels.decode(rows)
    for layer in range(LAYERS):
        product = both.product(num_rows * queries)
        torch.testing.assert_close(kernels(layer, product), native(layer, product))
    assert both.same_pools()


def test_mixed_steps_and_padding() -> None:
    both = Both(0, 3, [7, 12])
    decode = DecodeRows(torch.tensor([1, 2]), torch.tensor([7, 12]), 13, 1)
    prefill = PrefillRows((3, 4), (0, 0), (5, 2))
    native, kernels = both.native.mixed(decode, prefill), both.kernels.mixed(decode, prefill)
    product = both.product(9)
    torch.testing.assert_close(kernels(1, product), native(1, product))
    assert both.same_pools()
    # A row of slot 0 gives zeros, and nothing is written for it.
    before = both.pools[1].latents.clone()
    padded = DecodeRows(torch.tensor([0]), torch.tensor([1]), 1, 2)
    assert not both.kernels.decode(padded)(0, both.product(2)).any()
    torch.testing.assert_close(both.pools[1].latents, before, equal_nan=True, rtol=0, atol=0)


def test_a_broken_draft_breaks_those_who_see_it() -> None:
    both = Both(1, 1, [9])
    rows = DecodeRows(torch.tensor([1]), torch.tensor([9]), 9, 3)
    product = both.product(3)
    latent = product.latent.clone()
    latent[1, 2] = torch.nan
    out = both.kernels.decode(rows)(0, replace(product, latent=latent))
    assert out.isnan().flatten(1).any(1).tolist() == [False, True, True]


def test_sparse_attention_is_refused() -> None:
    shape = MLAShape(2, RANK + ROPE, (0,), 4)
    pool = MLAKVPool(shape, 4, 1, torch.float64, "cpu")
    with pytest.raises(AssertionError, match="indexer"):
        TritonMLA(pool, torch.zeros(2, 4, dtype=torch.int32), NQ, RANK)

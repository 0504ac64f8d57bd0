"""Latent attention over sgl_kernel (its references: no GPU) against the plain PyTorch backend, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.attention_reference import random_page_table
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.configs.rope_config import RopeConfig
from sglang.srt.layers.attention.base import Block, CacheRows, DecodeRows, PrefillRows, ScratchRows
from sglang.srt.layers.attention.heads import Positions
from sglang.srt.layers.attention.mla import LatentHeads, RawLatents
from sglang.srt.layers.attention.mla_native import TorchNativeMLA
from sglang.srt.layers.attention.mla_triton import HeadSizes, TritonMLA
from sglang.srt.layers.norm import RMSNorm
from sglang.srt.layers.rope import Rope
from sglang.srt.mem_cache.mla_pool import MLAShape

NQ, NOPE, ROPE, V, RANK = 3, 5, 4, 7, 6
NUM_SLOTS, MAX_LEN, LAYERS = 4, 40, 2
SIZES = HeadSizes(NQ, NOPE, ROPE, V, RANK)
ROPES = Rope(RopeConfig(), ROPE, 64, torch.float64, "cpu")


class Both:
    """The two backends over pools of the same latents: NaN where nothing was written."""

    def __init__(self, seed: int, page_size: int, lens: list[int]) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.interleaved = bool(seed % 2)
        max_pages = -(-MAX_LEN // page_size)
        num_pages = NUM_SLOTS * max_pages
        table = random_page_table(NUM_SLOTS, max_pages, num_pages, self.generator)
        shape = MLAShape(LAYERS, RANK + ROPE)
        self.pools = [shape.make_pool(num_pages, page_size, torch.float64, "cpu") for _ in range(2)]
        self.native = TorchNativeMLA(self.pools[0], table)
        self.kernels = TritonMLA(self.pools[1], table, SIZES)
        for pool in self.pools:
            pool.poison(range(1, num_pages + 1))
        self.heads = LatentHeads(self.draw(NQ, NOPE + V, RANK), NOPE)
        self.norm = RMSNorm(self.draw(RANK), 1e-6)
        for slot, length in enumerate(lens, start=1):
            places = self.native.places(torch.full((length,), slot), torch.arange(length))
            for layer in range(LAYERS):
                kept = self.draw(length, RANK + ROPE)
                for pool in self.pools:
                    pool.write(layer, places, kept)

    def draw(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self.generator, dtype=torch.float64)

    def product(self, num: int, writes: bool = True) -> RawLatents:
        positions = Positions(ROPES, torch.randint(0, 64, (num,), generator=self.generator))
        down = self.draw(num if writes else 0, 3 + RANK + ROPE)[:, 3:]
        q = self.draw(num, NQ, NOPE + ROPE)
        return RawLatents(q, down, self.norm, positions, self.interleaved, self.heads, 0.31)

    def compare(self, native: object, kernels: object, layer: int, product: RawLatents) -> None:
        wanted = native(layer, product)  # type: ignore[operator]
        torch.testing.assert_close(kernels(layer, product), wanted)  # type: ignore[operator]

    def same_pools(self) -> bool:
        first, second = (pool.latents[:, pool.page_size :] for pool in self.pools)
        return torch.allclose(first, second, equal_nan=True)


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
        product = both.product(num_rows * queries, block is not Block.NONE)
        both.compare(native, kernels, layer, product)
    assert both.same_pools()


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([1, 3]), st.lists(st.integers(1, 30), min_size=1, max_size=2))
def test_levels_of_a_draft_tree(seed: int, page_size: int, lens: list[int]) -> None:
    """Their latents stay in scratch places; two levels, of which the second sees some of the first."""
    both, num_rows, k = Both(seed, page_size, lens), len(lens), 3
    for level in range(2):
        mask = torch.rand(num_rows, k, k * (level + 1), generator=both.generator) < 0.5
        mask[:, :, k * level :] = torch.eye(k, dtype=torch.bool)
        slots = torch.arange(1, num_rows + 1)
        rows = ScratchRows(slots, torch.tensor(lens), max(lens), k, k * level, mask)
        both.compare(both.native.scratch(rows), both.kernels.scratch(rows), 0, both.product(num_rows * k))
    assert both.same_pools()


def test_only_the_cache() -> None:
    """As many tokens of a row as are counted; nothing of the pad slot."""
    both = Both(3, 3, [7, 12])
    root, counts = torch.tensor([7, 12, 1]), torch.tensor([2, 1, 2])
    product = both.product(6)
    positions = Positions(ROPES, root, 2)
    assert positions.of_tokens.tolist() == [7, 8, 12, 13, 1, 2]
    of_rows = RawLatents(
        product.q[:0], product.down, both.norm, positions, both.interleaved, both.heads, product.scale
    )
    before = both.pools[1].latents[:, :3].clone()
    both.kernels.write(1, of_rows, CacheRows(torch.tensor([1, 2, 0]), root, 2, counts))
    places = both.native.places(torch.tensor([1, 1, 2]), torch.tensor([7, 8, 12]))
    both.pools[0].write(1, places, of_rows.entries()[:3])
    assert both.same_pools() and torch.equal(both.pools[1].latents[:, :3], before)


def test_mixed_steps_and_padding() -> None:
    both = Both(0, 3, [7, 12])
    decode = DecodeRows(torch.tensor([1, 2]), torch.tensor([7, 12]), 13, 1)
    prefill = PrefillRows((3, 4), (0, 0), (5, 2))
    native, kernels = both.native.mixed(decode, prefill), both.kernels.mixed(decode, prefill)
    both.compare(native, kernels, 1, both.product(9))
    prefill = PrefillRows((1, 3), (8, 5), (4, 9))
    both.compare(both.native.prefill(prefill), both.kernels.prefill(prefill), 1, both.product(13))
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
    product.down[1, 2] = torch.nan
    out = both.kernels.decode(rows)(0, product)
    assert out.isnan().flatten(1).any(1).tolist() == [False, True, True]


def test_a_layer_with_an_indexer_is_an_error() -> None:
    both = Both(0, 1, [9])
    product = replace(both.product(1), sparse=True)
    with pytest.raises(AssertionError, match="all places"):
        both.kernels.decode(DecodeRows(torch.tensor([1]), torch.tensor([9]), 9, 1))(0, product)

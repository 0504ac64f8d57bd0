"""Sparse latent attention over sgl_kernel (its references: no GPU) against the plain backend, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.attention_reference import random_page_table
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.configs.mla_config import IndexConfig
from sglang.srt.configs.rope_config import RopeConfig
from sglang.srt.layers.attention import mla_sparse_chunks
from sglang.srt.layers.attention.base import Block, CacheRows, DecodeRows, PrefillRows, ScratchRows
from sglang.srt.layers.attention.heads import Positions
from sglang.srt.layers.attention.mla import IndexProduct, LatentHeads, RawLatents
from sglang.srt.layers.attention.mla_native import TorchNativeMLA
from sglang.srt.layers.attention.mla_sparse_triton import TritonSparseMLA
from sglang.srt.layers.attention.mla_triton import HeadSizes
from sglang.srt.layers.norm import RMSNorm
from sglang.srt.layers.rope import Rope
from sglang.srt.mem_cache.mla_pool import MLAShape

NQ, NOPE, ROPE, V, RANK = 3, 5, 4, 7, 6
HEADS, DIM = 2, 4
NUM_SLOTS, MAX_LEN = 4, 60
WITH_INDEXER = (True, False, True)  # of three layers, the second of which takes over a choice
SIZES = HeadSizes(NQ, NOPE, ROPE, V, RANK)
ROPES = Rope(RopeConfig(), ROPE, 64, torch.float64, "cpu")


class Both:
    """The two backends over pools of the same content: NaN where nothing was written."""

    def __init__(
        self,
        seed: int,
        page_size: int,
        lens: list[int],
        top_k: int,
        with_indexer: tuple[bool, ...] = WITH_INDEXER,
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.interleaved = bool(seed % 2)
        self.top_k = top_k
        self.with_indexer = with_indexer
        max_pages = -(-MAX_LEN // page_size)
        num_pages = NUM_SLOTS * max_pages
        table = random_page_table(NUM_SLOTS, max_pages, num_pages, self.generator)
        layers = tuple(i for i, has in enumerate(with_indexer) if has)
        shape = MLAShape(len(with_indexer), RANK + ROPE, layers, DIM)
        self.pools = [shape.make_pool(num_pages, page_size, torch.float64, "cpu") for _ in range(2)]
        self.native = TorchNativeMLA(self.pools[0], table)
        config = IndexConfig(top_k, HEADS, DIM, False, layers)
        self.kernels = TritonSparseMLA(self.pools[1], table, SIZES, config)
        for pool in self.pools:
            pool.poison(range(1, num_pages + 1))
        self.heads = LatentHeads(self.draw(NQ, NOPE + V, RANK), NOPE)
        self.norm = RMSNorm(self.draw(RANK), 1e-6)
        for slot, length in enumerate(lens, start=1):
            places = self.native.places(torch.full((length,), slot), torch.arange(length))
            for layer, has_indexer in enumerate(with_indexer):
                latent, keys = self.draw(length, RANK + ROPE), self.whole(length, DIM)
                for pool in self.pools:
                    pool.write(layer, places, latent)
                    if has_indexer:
                        pool.write_index_keys(layer, places, keys)

    def draw(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self.generator, dtype=torch.float64)

    def whole(self, *size: int) -> torch.Tensor:
        """Small integers: many scores are equal, and none is rounded."""
        return torch.randint(-2, 3, size, generator=self.generator).double()

    def product(self, layer: int, num: int, writes: bool = True) -> RawLatents:
        positions = Positions(ROPES, torch.randint(0, 64, (num,), generator=self.generator))
        down = self.draw(num if writes else 0, 3 + RANK + ROPE)[:, 3:]
        index = None
        if self.with_indexer[layer]:
            parts = self.whole(num, HEADS, DIM), self.whole(num, DIM), self.whole(num, HEADS)
            index = IndexProduct(*parts, self.top_k)
        q = self.draw(num, NQ, NOPE + ROPE)
        return RawLatents(q, down, self.norm, positions, self.interleaved, self.heads, 0.31, True, index)

    def compare(self, native: object, kernels: object, num_tokens: int, writes: bool = True) -> None:
        """Layer by layer, as a step does."""
        positions = Positions(ROPES, torch.randint(0, 64, (num_tokens,), generator=self.generator))
        for layer in range(len(self.with_indexer)):
            product = replace(self.product(layer, num_tokens, writes), positions=positions)
            wanted = native(layer, replace(product, q=product.q.clone()))  # type: ignore[operator]
            torch.testing.assert_close(kernels(layer, product), wanted)  # type: ignore[operator]

    def same_pools(self) -> bool:
        pairs = zip(*(pool.tensors for pool in self.pools), strict=True)
        size = self.pools[0].page_size
        return all(torch.allclose(a[:, size:], b[:, size:], equal_nan=True) for a, b in pairs)


@settings(max_examples=8, deadline=None)
@given(
    st.integers(0, 1000),
    st.sampled_from([1, 3, 16]),
    st.lists(st.integers(1, 40), min_size=1, max_size=3),
    st.integers(1, 5),
    st.sampled_from(Block),
    st.integers(1, 50),
)
def test_decode_and_verify(
    seed: int, page_size: int, lens: list[int], queries: int, block: Block, top_k: int
) -> None:
    both = Both(seed, page_size, lens, top_k)
    num_rows = len(lens)
    mask = torch.rand(num_rows, queries, queries, generator=both.generator) < 0.5
    mask = mask.tril() | torch.eye(queries, dtype=torch.bool)
    rows = DecodeRows(
        torch.arange(1, num_rows + 1), torch.tensor(lens), max(lens) + 2, queries, block,
        mask if block is Block.TREE else None,
    )  # fmt: skip
    native, kernels = both.native.decode(rows), both.kernels.decode(rows)
    both.compare(native, kernels, num_rows * queries, block is not Block.NONE)
    assert both.same_pools()


@settings(max_examples=6, deadline=None)
@given(
    st.integers(0, 1000),
    st.sampled_from([1, 3]),
    st.lists(st.integers(1, 30), min_size=1, max_size=2),
    st.integers(1, 40),
)
def test_levels_of_a_draft_tree(seed: int, page_size: int, lens: list[int], top_k: int) -> None:
    """What the cache keeps of them stays in scratch places; the second level sees some of the first."""
    both, num_rows, k = Both(seed, page_size, lens, top_k, (True,)), len(lens), 3
    for level in range(2):
        mask = torch.rand(num_rows, k, k * (level + 1), generator=both.generator) < 0.5
        mask[:, :, k * level :] = torch.eye(k, dtype=torch.bool)
        slots = torch.arange(1, num_rows + 1)
        rows = ScratchRows(slots, torch.tensor(lens), max(lens), k, k * level, mask)
        both.compare(both.native.scratch(rows), both.kernels.scratch(rows), num_rows * k)
    assert both.same_pools()


def test_only_the_cache() -> None:
    """As many tokens of a row as are counted; nothing of the pad slot."""
    both = Both(3, 3, [7, 12], 4)
    root, counts = torch.tensor([7, 12, 1]), torch.tensor([2, 1, 2])
    product = both.product(2, 6)
    product = replace(product, q=product.q[:0], positions=Positions(ROPES, root, 2))
    before = [tensor[:, :3].clone() for tensor in both.pools[1].tensors]
    both.kernels.write(2, product, CacheRows(torch.tensor([1, 2, 0]), root, 2, counts))
    places = both.native.places(torch.tensor([1, 1, 2]), torch.tensor([7, 8, 12]))
    assert product.index is not None
    both.pools[0].write(2, places, product.entries()[:3])
    both.pools[0].write_index_keys(2, places, product.index.k[:3])
    assert both.same_pools()
    for tensor, held in zip(both.pools[1].tensors, before, strict=True):
        assert torch.equal(tensor[:, :3], held)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([1, 3, 16]), st.integers(1, 50), st.data())
def test_chunks_and_mixed_steps(seed: int, page_size: int, top_k: int, data: st.DataObject) -> None:
    """Chunks that see no more places than may be chosen, and longer ones, of several blocks."""
    starts = data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=3))
    lengths = tuple(data.draw(st.integers(1, 25)) for _ in starts)
    both = Both(seed, page_size, [*starts, 17], top_k)
    num_chunks, num_tokens = len(starts), sum(lengths)
    prefill = PrefillRows(tuple(range(1, num_chunks + 1)), tuple(starts), lengths)
    decode = DecodeRows(torch.tensor([num_chunks + 1]), torch.tensor([17]), 18, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mla_sparse_chunks, "BLOCK_ROWS", 2)
        if data.draw(st.booleans()):
            native, kernels = both.native.mixed(decode, prefill), both.kernels.mixed(decode, prefill)
            num_tokens += 1
        else:
            native, kernels = both.native.prefill(prefill), both.kernels.prefill(prefill)
        both.compare(native, kernels, num_tokens)
    assert both.same_pools()


def test_padding() -> None:
    """A row of slot 0 gives zeros, and nothing is written for it."""
    both = Both(0, 3, [7], 4)
    before = [tensor.clone() for tensor in both.pools[1].tensors]
    padded = both.kernels.decode(DecodeRows(torch.tensor([0]), torch.tensor([1]), 1, 2))
    for layer in range(len(WITH_INDEXER)):
        assert not padded(layer, both.product(layer, 2)).any()
    for tensor, held in zip(both.pools[1].tensors, before, strict=True):
        torch.testing.assert_close(tensor, held, equal_nan=True, rtol=0, atol=0)


def test_a_broken_draft_breaks_those_who_see_it() -> None:
    both = Both(1, 1, [20], 6)
    rows = DecodeRows(torch.tensor([1]), torch.tensor([20]), 20, 3)
    product = both.product(0, 3)
    assert product.index is not None
    down, keys = product.down.clone(), product.index.k.clone()
    down[1], keys[1] = torch.nan, torch.nan
    broken = replace(product, down=down, index=replace(product.index, k=keys))
    out = both.kernels.decode(rows)(0, broken)
    assert out.isnan().flatten(1).any(1).tolist() == [False, True, True]


def test_a_layer_without_a_choice_is_an_error() -> None:
    both = Both(0, 1, [9], 4)
    rows = DecodeRows(torch.tensor([1]), torch.tensor([9]), 9, 1)
    with pytest.raises(AssertionError, match="no indexer"):
        both.kernels.decode(rows)(1, both.product(1, 1))

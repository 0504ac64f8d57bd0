"""The Triton backend on a CPU (its reference paths) against torch_native, with NaN where no row may look.

The interpreter runs the same calls through the kernels: see ``body_kernels``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.attention_reference import random_page_table
from helpers.products import product_of
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_kernel._dispatch import has_triton
from sgl_kernel.testing.interpret import interpret
from sglang.srt.configs.rope_config import RopeConfig
from sglang.srt.layers.attention.base import AttentionBackend, Block, DecodeRows, PrefillRows, ScratchRows
from sglang.srt.layers.attention.heads import HeadProduct, Positions, Scope
from sglang.srt.layers.attention.torch_native import TorchNativeAttention
from sglang.srt.layers.attention.triton_backend import TritonAttention
from sglang.srt.layers.norm import RMSNorm
from sglang.srt.layers.rope import Rope
from sglang.srt.mem_cache.kv_pool import MHAKVPool

NUM_LAYERS, NKV, GROUP, D = 2, 2, 3, 16
NUM_SLOTS, MAX_LEN, LAYER = 5, 64, 1
NQ = NKV * GROUP


class Pair:
    """The same random cache under both backends, each with a pool of its own."""

    def __init__(
        self, seed: int, page_size: int, lens: list[int], dtype: torch.dtype, window: int | None = None
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype
        pages = -(-MAX_LEN // page_size)
        table = random_page_table(NUM_SLOTS, pages, NUM_SLOTS * pages, self.generator)
        pools = [MHAKVPool(NUM_LAYERS, NUM_SLOTS * pages, page_size, NKV, D, dtype, "cpu") for _ in "ab"]
        for pool in pools:
            pool.poison(range(1, NUM_SLOTS * pages + 1))
        self.pools = pools
        self.backends: tuple[AttentionBackend, AttentionBackend] = (
            TorchNativeAttention(pools[0], table),
            TritonAttention(pools[1], table, NQ, windows=(None,) if window is None else (3, window)),
        )
        self.scope = Scope()
        if window is not None:
            self.scope = Scope(window, self.draw(NQ, 1)[:, 0, 0].float().contiguous())
        self.lens = torch.tensor([1, *lens])  # slot 0 is padding
        for slot, length in enumerate(lens, start=1):
            k, v = self.draw(length, NKV), self.draw(length, NKV)
            places = self.backends[0].places(torch.full((length,), slot), torch.arange(length))
            for pool in pools:
                pool.write(LAYER, places, k, v)

    def draw(self, num: int, heads: int) -> torch.Tensor:
        return torch.randn(num, heads, D, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def slots(self) -> torch.Tensor:
        return torch.randperm(len(self.lens) - 1, generator=self.generator) + 1

    def check(  # type: ignore[no-untyped-def]
        self, ask, num: int, real: int | None = None, write: bool = True, norm: RMSNorm | None = None
    ) -> None:
        """``ask(backend)`` gives a layer's attention; outputs (of ``real`` tokens) and pools must agree."""
        rope = Rope(RopeConfig(theta=100.0), D, MAX_LEN, self.dtype, "cpu")
        positions = torch.randint(0, MAX_LEN, (num,), generator=self.generator)
        num_kv = NKV if write else 0
        qkv = self.draw(num, NQ + 2 * num_kv).flatten(1)
        product = HeadProduct(qkv, NQ, num_kv, Positions(rope, positions), norm if write else None)
        product = replace(product, scope=self.scope)
        expected, got = (ask(b)(LAYER, replace(product, qkv=qkv.clone())) for b in self.backends)
        assert torch.isfinite(got).all()
        # Our own ops turn in float32, whatever the product's type is.
        torch.testing.assert_close(got[:real], expected[:real], rtol=3e-5, atol=3e-5)
        after = [pool.kv[:, pool.page_size :].nan_to_num(7.0) for pool in self.pools]
        torch.testing.assert_close(*after, rtol=3e-6, atol=3e-6)


def tree_mask(rows: int, num: int, extra: int, generator: torch.Generator) -> torch.Tensor:
    mask = torch.rand(rows, num, extra, generator=generator) < 0.5
    mask[:, :, extra - num :] |= torch.eye(num, dtype=torch.bool)
    return mask


worlds = st.tuples(
    st.integers(0, 10_000),
    st.sampled_from([1, 3, 16]),
    st.lists(st.integers(1, 40), min_size=1, max_size=NUM_SLOTS),
    st.sampled_from([torch.float64, torch.float32]),
)


@settings(max_examples=40, deadline=None)
@given(worlds, st.sampled_from(list(Block)), st.integers(1, 6), st.booleans(), st.integers(0, 1))
def test_decode(world: tuple, block: Block, num: int, normed: bool, padding: int) -> None:  # type: ignore[type-arg]
    _decode(Pair(*world), block, num, normed, padding)


def _decode(pair: Pair, block: Block, num: int, normed: bool = False, padding: int = 0) -> None:
    slots = torch.cat((pair.slots(), torch.zeros(padding, dtype=torch.int64)))
    lens = pair.lens[slots]
    mask = tree_mask(len(slots), num, num, pair.generator) if block is Block.TREE else None
    rows = DecodeRows(slots, lens, int(lens.max()) + 5, num, block, mask)
    weight = torch.cat([torch.rand(1, D, dtype=pair.dtype).expand(n, -1) for n in (NQ, NKV)]) + 0.5
    norm = RMSNorm(weight, 1e-5) if normed else None
    real = (len(slots) - padding) * num
    pair.check(lambda backend: backend.decode(rows), len(slots) * num, real, block is not Block.NONE, norm)


@settings(max_examples=40, deadline=None)
@given(worlds, st.data())
def test_prefill_and_mixed(world: tuple, data: st.DataObject) -> None:  # type: ignore[type-arg]
    pair = Pair(*world)
    slots = pair.slots()
    cut = data.draw(st.integers(0, len(slots) - 1))
    starts = [data.draw(st.sampled_from([0, int(pair.lens[s])])) for s in slots[cut:]]
    lengths = [data.draw(st.integers(1, 20)) for _ in starts]
    _prefill(pair, slots, cut, starts, lengths)


def _prefill(pair: Pair, slots: torch.Tensor, cut: int, starts: list[int], lengths: list[int]) -> None:
    """The first ``cut`` slots decode."""
    chunks = PrefillRows(tuple(slots[cut:].tolist()), tuple(starts), tuple(lengths))
    if cut == 0:
        pair.check(lambda backend: backend.prefill(chunks), sum(lengths))
        return
    lens = pair.lens[slots[:cut]]
    decode = DecodeRows(slots[:cut], lens, int(lens.max()), 1)
    pair.check(lambda backend: backend.mixed(decode, chunks), cut + sum(lengths))


@settings(max_examples=40, deadline=None)
@given(worlds, st.sampled_from([1, 2, 7, 60]), st.integers(1, 6), st.sampled_from(list(Block)))
def test_windows_and_sinks(world: tuple, window: int, num: int, block: Block) -> None:  # type: ignore[type-arg]
    """In trees a window counts the places a node sees; of chunks and decode rows together as apart."""
    pair = Pair(*world, window=window)
    _decode(pair, block, num, padding=num % 2)
    pair = Pair(*world, window=window)
    slots = pair.slots()
    starts = [int(pair.lens[slot]) for slot in slots[len(slots) // 2 :]]
    _prefill(pair, slots, len(slots) // 2, starts, [num * 3] * len(starts))


@settings(max_examples=25, deadline=None)
@given(worlds, st.integers(1, 4), st.integers(1, 4))
def test_scratch_levels(world: tuple, width: int, levels: int) -> None:  # type: ignore[type-arg]
    _scratch(Pair(*world), width, levels)


@settings(max_examples=25, deadline=None)
@given(worlds, st.sampled_from([1, 2, 7, 60]), st.integers(1, 4), st.integers(1, 4))
def test_scratch_levels_in_a_window(world: tuple, window: int, width: int, levels: int) -> None:  # type: ignore[type-arg]
    """No layer sees everything, and so no plan does."""
    _scratch(Pair(*world, window=window), width, levels)


def _scratch(pair: Pair, width: int, levels: int) -> None:
    slots = pair.slots()
    lens = pair.lens[slots]
    for level in range(levels):
        start = level * width
        mask = tree_mask(len(slots), width, start + width, pair.generator)
        rows = ScratchRows(slots, lens, int(lens.max()), width, start, mask)
        pair.check(lambda backend, rows=rows: backend.scratch(rows), len(slots) * width)


def test_padded_rows_give_zeros_and_disturb_nobody() -> None:
    for dtype in (torch.float32, torch.float64):
        pair = Pair(3, 4, [5, 9], dtype)
        _decode(pair, Block.CAUSAL, 1, padding=2)
        zeros = DecodeRows(torch.tensor([0, 2]), torch.tensor([1, 9]), 9, 1)
        product = product_of(pair.draw(2, NQ), pair.draw(2, NKV), pair.draw(2, NKV))
        assert not pair.backends[1].decode(zeros)(LAYER, product)[0].any()


def test_places_agree() -> None:
    pair = Pair(0, 4, [1], torch.float32)
    slots, positions = torch.tensor([[1, 1], [3, 0]]), torch.tensor([[0, 7], [13, 2]])
    expected, got = (backend.places(slots, positions) for backend in pair.backends)
    assert got.dtype == torch.int64 and torch.equal(got, expected)


def body_kernels() -> None:
    for seed, (block, num) in enumerate(
        ((Block.CAUSAL, 3), (Block.TREE, 4), (Block.NONE, 2), (Block.TREE, 12))
    ):
        # One tile turns in attention's own launch, 12 queries of 3 heads in one ahead of it.
        _decode(Pair(seed, (1, 16)[seed % 2], [33, 5, 21], torch.float32), block, num, seed < 2, 1)
    _decode(Pair(9, 16, [5], torch.float32, window=2), Block.TREE, 3)
    _decode(Pair(9, 16, [5], torch.float32, window=2), Block.NONE, 1)
    _scratch(Pair(2, 16, [5], torch.float32, window=3), 2, 2)
    for seed, page_size in ((0, 1), (1, 16)):
        # 2 nodes a level turn in attention's own launch, 12 in one ahead of it.
        _scratch(Pair(seed, page_size, [33, 5], torch.float32), *((2, 3), (12, 2))[seed])
        pair = Pair(seed, page_size, [33, 5, 21, 2], torch.float32)
        slots = pair.slots()
        _prefill(pair, slots, 2, [0, int(pair.lens[slots[3]])], [20, 11])


@pytest.mark.skipif(not has_triton(), reason="kernels need triton")
def test_kernels_in_the_interpreter() -> None:
    interpret(__file__, "body_kernels")

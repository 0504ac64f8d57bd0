"""Prefill by FlashInfer, whose wrapper is computed in torch from what it is told, against our own kernels'
references. Its real kernels need a GPU.
"""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from helpers.attention_reference import random_page_table
from helpers.fake_flashinfer import fake_flashinfer
from helpers.products import product_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sgl_kernel.attention import AttentionShape
from sgl_kernel.attention.prefill import flashinfer as planner_module
from sgl_kernel.attention.prefill.flashinfer import FlashInferPrefill
from sgl_kernel.flashinfer_package import FlashInferError, find_flashinfer
from sglang.srt.configs.rope_config import RopeConfig
from sglang.srt.layers.attention.base import Block, DecodeRows, PrefillRows, ScratchRows
from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttention
from sglang.srt.layers.attention.heads import HeadProduct, Positions
from sglang.srt.layers.attention.triton_backend import TritonAttention
from sglang.srt.layers.rope import Rope
from sglang.srt.mem_cache.kv_pool import MHAKVPool

NUM_LAYERS, NKV, GROUP, D = 2, 2, 3, 16
NQ, NUM_SLOTS, MAX_LEN, LAYER = NKV * GROUP, 5, 64, 1
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = fake_flashinfer()
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(planner_module, "WORKSPACE_BYTES", 1 << 10)
    return module


class World:
    """The same cache twice: our own kernels', and one whose prefill is FlashInfer's."""

    def __init__(self, seed: int, page_size: int, lens: list[int]) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        pages = -(-MAX_LEN // page_size)
        self.table = random_page_table(NUM_SLOTS, pages, NUM_SLOTS * pages, self.generator)
        self.pools = [
            MHAKVPool(NUM_LAYERS, NUM_SLOTS * pages, page_size, NKV, D, torch.float32, "cpu") for _ in "ab"
        ]
        for pool in self.pools:
            pool.poison(range(1, NUM_SLOTS * pages + 1))
        own, self.wrapped = (TritonAttention(pool, self.table, NQ) for pool in self.pools)
        shape = AttentionShape(NQ, NKV, D, page_size)
        self.planner = FlashInferPrefill(shape, torch.float32, CPU)
        self.backends = (own, FlashInferAttention(self.wrapped, self.planner))
        self.lens = torch.tensor([1, *lens])  # slot 0 is padding
        for slot, length in enumerate(lens, start=1):
            k, v = self.draw(length, NKV), self.draw(length, NKV)
            places = own.places(torch.full((length,), slot), torch.arange(length))
            for pool in self.pools:
                pool.write(LAYER, places, k, v)

    def draw(self, num: int, heads: int) -> torch.Tensor:
        return torch.randn(num, heads, D, generator=self.generator)

    def same_pools(self) -> None:
        torch.testing.assert_close(*(pool.kv[:, pool.page_size :].nan_to_num(7.0) for pool in self.pools))


def expect_same(
    world: World, decode: DecodeRows | None, chunks: PrefillRows, positions: torch.Tensor
) -> None:
    rope = Rope(RopeConfig(theta=100.0), D, 2 * MAX_LEN, torch.float32, "cpu")
    qkv = world.draw(len(positions), NQ + 2 * NKV).flatten(1)
    outs = []
    for backend in world.backends:
        layers = backend.mixed(decode, chunks) if decode else backend.prefill(chunks)
        outs.append(layers(LAYER, HeadProduct(qkv.clone(), NQ, NKV, Positions(rope, positions))))
    assert torch.isfinite(outs[1]).all()
    torch.testing.assert_close(outs[1], outs[0], rtol=3e-5, atol=3e-5)
    world.same_pools()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(0, 10_000),
    st.sampled_from([1, 16]),
    st.lists(st.integers(1, 40), min_size=1, max_size=NUM_SLOTS),
    st.data(),
)
def test_chunks_alone_and_behind_decode_rows(
    seed: int, page_size: int, lens: list[int], data: st.DataObject
) -> None:
    world = World(seed, page_size, lens)
    slots = torch.randperm(len(lens), generator=world.generator) + 1
    cut = data.draw(st.integers(0, len(slots) - 1))
    starts = [data.draw(st.sampled_from([0, int(world.lens[s])])) for s in slots[cut:]]
    lengths = [data.draw(st.integers(1, 20)) for _ in starts]
    chunks = PrefillRows(tuple(slots[cut:].tolist()), tuple(starts), tuple(lengths))
    base = world.lens[slots[:cut]]
    decode = DecodeRows(slots[:cut], base, int(base.max()), 1) if cut else None
    own = [torch.arange(start, start + n) for start, n in zip(starts, lengths, strict=True)]
    expect_same(world, decode, chunks, torch.cat([base, *own]))


def test_what_the_wrapper_is_told(package: ModuleType) -> None:
    world = World(0, 16, [20, 30, 5])
    world.backends[1].prefill(PrefillRows((2, 1), (30, 0), (4, 32)))
    wrapper = package.BatchPrefillWithPagedKVCacheWrapper.made[0]
    told = wrapper.plans[0]
    assert told["qo_indptr"].tolist() == [0, 4, 36] and told["paged_kv_indptr"].tolist() == [0, 3, 5]
    assert told["paged_kv_last_page_len"].tolist() == [2, 16] and told["seq_lens"].tolist() == [34, 32]
    assert torch.equal(told["paged_kv_indices"], torch.cat([world.table[2, :3], world.table[1, :2]]))
    assert (told["num_qo_heads"], told["num_kv_heads"], told["head_dim_qk"], told["page_size"]) == (
        NQ,
        NKV,
        D,
        16,
    )
    assert told["sm_scale"] == D**-0.5


def test_a_plan_is_good_while_the_next_one_is_made(package: ModuleType) -> None:
    world = World(1, 1, [20, 9])
    layers = [world.backends[1].prefill(PrefillRows((1,), (0,), (n,))) for n in (7, 3)]
    expected = world.backends[0].prefill(PrefillRows((1,), (0,), (7,)))
    q, k, v = world.draw(7, NQ), world.draw(7, NKV), world.draw(7, NKV)
    got, wanted = (made(LAYER, product_of(q, k, v)) for made in (layers[0], expected))
    torch.testing.assert_close(got, wanted, rtol=3e-5, atol=3e-5)
    world.backends[1].prefill(PrefillRows((1,), (0,), (2,)))
    one, other = package.BatchPrefillWithPagedKVCacheWrapper.made
    assert one.workspace is other.workspace
    assert [len(w.plans) for w in (one, other)] == [2, 1]


def test_all_else_is_our_own(package: ModuleType) -> None:
    world = World(2, 1, [20, 9])
    slots, base = torch.tensor([1, 2]), torch.tensor([20, 9])
    mask = torch.ones(2, 1, 1, dtype=torch.bool)
    q, k, v = world.draw(4, NQ), world.draw(4, NKV), world.draw(4, NKV)
    for ask in (
        lambda b: b.decode(DecodeRows(slots, base, 20, 2, Block.CAUSAL))(LAYER, product_of(q, k, v)),
        lambda b: b.scratch(ScratchRows(slots, base, 20, 1, 0, mask))(LAYER, product_of(q[:2], k[:2], v[:2])),
        lambda b: b.places(slots, base),
    ):
        own, wrapped = (ask(backend) for backend in world.backends)
        assert torch.equal(own, wrapped)
    assert all(not w.plans for w in package.BatchPrefillWithPagedKVCacheWrapper.made)
    assert world.backends[1].needs_exact_lens is False


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(FlashInferError, match=r"pip install flashinfer-python==0\.6\.18\.post1") as caught:
        find_flashinfer()
    assert "\n" not in str(caught.value)


def test_kernels_that_cannot_be_made(package: ModuleType) -> None:
    world = World(3, 1, [4])
    world.planner.build(world.table)
    package.BatchPrefillWithPagedKVCacheWrapper.fails = "ninja:\n  nvcc: not found"
    with pytest.raises(FlashInferError, match="nvcc and CUDA_HOME.: ninja: nvcc: not found") as caught:
        world.planner.build(world.table)
    assert "\n" not in str(caught.value)

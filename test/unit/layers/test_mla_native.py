"""Latent attention against loops in float64 over keys and values made of each latent, NaN wherever a row
must not look."""

from __future__ import annotations

import math
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
from helpers.attention_reference import random_page_table
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.layers.attention import rows as row_places
from sglang.srt.layers.attention.base import Block, DecodeRows, PrefillRows
from sglang.srt.layers.attention.mla import IndexProduct, LatentHeads, LatentProduct
from sglang.srt.layers.attention.mla_native import TorchNativeMLA
from sglang.srt.layers.attention.mla_sparse import BLOCK_QUERIES, best_places, index_scores
from sglang.srt.mem_cache.mla_pool import MLAShape

NQ, NOPE, ROPE, V, LATENT, INDEX_HEADS, INDEX_DIM, TOP_K = 3, 5, 4, 7, 6, 2, 4, 5
SCALE, LAYER, NUM_SLOTS, MAX_LEN = 0.31, 1, 4, 40
SHAPE = MLAShape(3, LATENT + ROPE, (1,), INDEX_DIM)
HEADS = LatentHeads(
    torch.randn(NQ, NOPE + V, LATENT, generator=torch.Generator().manual_seed(7), dtype=torch.float64), NOPE
)


@dataclass
class Kept:
    """What a slot's places hold."""

    latents: torch.Tensor  # [len, LATENT + ROPE]
    index_keys: torch.Tensor  # [len, INDEX_DIM]

    def then(self, product: LatentProduct) -> Kept:
        assert product.index is not None
        return Kept(torch.cat((self.latents, product.latent)), torch.cat((self.index_keys, product.index.k)))


class World:
    """A pool of NaN with the first ``lens[slot]`` places of each slot filled."""

    def __init__(self, seed: int, page_size: int, lens: list[int]) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        max_pages = -(-MAX_LEN // page_size)
        num_pages = NUM_SLOTS * max_pages
        self.pool = SHAPE.make_pool(num_pages, page_size, torch.float64, "cpu")
        self.pool.poison(range(1, num_pages + 1))
        table = random_page_table(NUM_SLOTS, max_pages, num_pages, self.generator)
        self.backend = TorchNativeMLA(self.pool, table)
        self.kept: dict[int, Kept] = {}
        for slot, length in enumerate(lens, start=1):
            kept = Kept(self.draw(length, LATENT + ROPE), self.draw(length, INDEX_DIM))
            places = self.backend.places(torch.full((length,), slot), torch.arange(length))
            self.pool.write(LAYER, places, kept.latents)
            self.pool.write_index_keys(LAYER, places, kept.index_keys)
            self.kept[slot] = kept

    def draw(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self.generator, dtype=torch.float64)

    def product(self, num: int, sparse: bool) -> LatentProduct:
        """Index queries and keys are whole numbers, so many scores are equal."""
        q, k = self.draw(num, INDEX_HEADS, INDEX_DIM).round(), self.draw(num, INDEX_DIM).round()
        index = IndexProduct(q, k, self.draw(num, INDEX_HEADS).round(), TOP_K)
        return LatentProduct(
            self.draw(num, NQ, NOPE), self.draw(num, NQ, ROPE), self.draw(num, LATENT + ROPE), HEADS, SCALE,
            sparse, index,
        )  # fmt: skip


def chosen(product: LatentProduct, query: int, index_keys: torch.Tensor, seen: list[int]) -> list[int]:
    """The best of ``seen``, the earlier of equal ones."""
    index = product.index
    assert index is not None

    def score(place: int) -> float:
        dots = [max(0.0, float(index.q[query, h] @ index_keys[place])) for h in range(INDEX_HEADS)]
        return sum(float(w) * dot for w, dot in zip(index.weights[query], dots, strict=True))

    return sorted(sorted(seen, key=lambda place: -score(place))[:TOP_K])


def attend_one(product: LatentProduct, query: int, kept: Kept, seen: list[int]) -> torch.Tensor:
    """One query over places of ``kept`` -> [NQ, V]."""
    if product.sparse:
        seen = chosen(product, query, kept.index_keys, seen)
    heads = []
    for h in range(NQ):
        keys_values = HEADS.weight[h] @ kept.latents[seen, :LATENT].T  # [NOPE + V, places]
        scores = product.q_nope[query, h] @ keys_values[:NOPE]
        scores = scores + product.q_rope[query, h] @ kept.latents[seen, LATENT:].T
        heads.append(keys_values[NOPE:] @ (scores * SCALE).softmax(0))
    return torch.stack(heads)


def close(got: torch.Tensor, expected: list[torch.Tensor]) -> None:
    assert torch.isfinite(got).all()
    assert torch.allclose(got, torch.stack(expected), rtol=1e-9, atol=1e-9)


def tree_parents(num_nodes: int, generator: torch.Generator) -> list[int]:
    return [-1, *(int(torch.randint(0, i, (), generator=generator)) for i in range(1, num_nodes))]


def path_to(node: int, parents: list[int]) -> list[int]:
    return [node] if node == 0 else [*path_to(parents[node], parents), node]


worlds = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10_000),
        "page_size": st.sampled_from([1, 3, 16]),
        "lens": st.lists(st.integers(1, 25), min_size=1, max_size=NUM_SLOTS),
    }
)


@settings(max_examples=40, deadline=None)
@given(worlds, st.booleans(), st.booleans(), st.integers(1, 6), st.sampled_from([1, 64]), st.booleans())
def test_decode_and_verify(
    world_args: dict[str, object], tree: bool, sparse: bool, num: int, short_row: int, broken: bool
) -> None:
    """``broken``: the last node's latent and index key are no numbers, which only its own query may see."""
    world = World(**world_args)  # type: ignore[arg-type]
    slots = torch.randperm(len(world.kept), generator=world.generator) + 1
    lens = torch.tensor([len(world.kept[int(s)].latents) for s in slots])
    parents = tree_parents(num, world.generator) if tree else list(range(-1, num - 1))
    paths = [path_to(node, parents) for node in range(num)]
    mask = torch.zeros(len(slots), num, num, dtype=torch.bool)
    for node, path in enumerate(paths):
        mask[:, node, path] = True
    product = world.product(len(slots) * num, sparse)
    assert product.index is not None
    if broken:
        product.latent[num - 1 :: num] = product.index.k[num - 1 :: num] = math.nan
    block = Block.TREE if tree else Block.CAUSAL
    rows = DecodeRows(slots, lens, int(lens.max()) + 3, num, block, mask if tree else None)
    with patch.object(row_places, "SHORT_ROW", short_row):
        got = world.backend.decode(rows)(LAYER, product)
    fine, expected = [], []
    for r, slot in enumerate(slots.tolist()):
        before = len(world.kept[slot].latents)
        own = product.take(slice(r * num, (r + 1) * num))
        kept = world.kept[slot].then(own)
        for node, path in enumerate(paths):
            if broken and node == num - 1:
                continue
            fine.append(r * num + node)
            seen = [*range(before), *(before + i for i in path)]
            expected.append(attend_one(own, node, kept, seen))
        places = world.backend.places(torch.full((before + num,), slot), torch.arange(before + num))
        assert torch.equal(world.pool.layer_latents(LAYER)[places].nan_to_num(), kept.latents.nan_to_num())
        written = world.pool.layer_index_keys(LAYER)[places]
        assert torch.equal(written.nan_to_num(), kept.index_keys.nan_to_num())
    if fine:
        close(got[fine], expected)


@settings(max_examples=30, deadline=None)
@given(worlds, st.booleans(), st.lists(st.integers(1, 12), min_size=1, max_size=NUM_SLOTS), st.booleans())
def test_prefill_and_mixed(
    world_args: dict[str, object], sparse: bool, lengths: list[int], mixed: bool
) -> None:
    """Chunks after what the slots hold; ``mixed``: the first slots decode instead."""
    world = World(**world_args)  # type: ignore[arg-type]
    slots = list(world.kept)
    num_decode = len(slots) // 2 if mixed else 0
    lengths = [1] * num_decode + (lengths * NUM_SLOTS)[: len(slots) - num_decode]
    starts = [len(world.kept[slot].latents) for slot in slots]
    product = world.product(sum(lengths), sparse)
    chunks = PrefillRows(tuple(slots[num_decode:]), tuple(starts[num_decode:]), tuple(lengths[num_decode:]))
    if num_decode:
        decode = DecodeRows(torch.tensor(slots[:num_decode]), torch.tensor(starts[:num_decode]), 30, 1)
        attention = world.backend.mixed(decode, chunks)
    else:
        attention = world.backend.prefill(chunks)
    expected, begin = [], 0
    for slot, start, length in zip(slots, starts, lengths, strict=True):
        own = product.take(slice(begin, begin + length))
        kept = world.kept[slot].then(own)
        expected += [attend_one(own, i, kept, list(range(start + i + 1))) for i in range(length)]
        begin += length
    close(attention(LAYER, product), expected)


def test_a_layer_without_an_indexer_takes_over_the_choice() -> None:
    world = World(3, 4, [20])
    rows = DecodeRows(torch.tensor([1]), torch.tensor([20]), 20, 2)
    first, second = world.product(2, sparse=True), world.product(2, sparse=True)
    assert second.index is not None
    attention = world.backend.decode(rows)
    attention(LAYER, first)
    following = LatentProduct(
        second.q_nope, second.q_rope, second.latent, HEADS, SCALE, sparse=True, index=None
    )
    places = world.backend.places(torch.ones(20, dtype=torch.int64), torch.arange(20))
    world.pool.write(LAYER + 1, places, world.kept[1].latents)
    kept = world.kept[1].then(first)
    latents = torch.cat((world.kept[1].latents, second.latent))
    expected = []
    for i in range(2):
        seen = chosen(first, i, kept.index_keys, list(range(20 + i + 1)))
        dense = LatentProduct(second.q_nope, second.q_rope, second.latent, HEADS, SCALE)
        expected.append(attend_one(dense, i, Kept(latents, kept.index_keys), seen))
    close(attention(LAYER + 1, following), expected)


def test_the_first_layer_needs_an_indexer() -> None:
    world = World(3, 4, [20])
    product = world.product(1, sparse=True)
    alone = LatentProduct(product.q_nope, product.q_rope, product.latent, HEADS, SCALE, sparse=True)
    rows = DecodeRows(torch.tensor([1]), torch.tensor([20]), 20, 1)
    with pytest.raises(AssertionError, match="no indexer"):
        world.backend.decode(rows)(LAYER, alone)


def test_many_queries_are_scored_in_blocks() -> None:
    draw = World(0, 1, [1]).draw
    num = 2 * BLOCK_QUERIES + 3
    q, k, weights = draw(1, num, 2, 4), draw(1, 9, 4), draw(1, num, 2)
    expected = torch.einsum("rqh,rqhw->rqw", weights, torch.einsum("rqhd,rwd->rqhw", q, k).relu())
    assert torch.allclose(index_scores(q, k, weights), expected)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-1, 1), min_size=1, max_size=12), st.integers(1, 12), st.integers(0, 100))
def test_best_places_are_the_first_of_equal_ones(values: list[int], top_k: int, seed: int) -> None:
    scores = torch.tensor(values, dtype=torch.float32)
    seen = torch.rand(len(values), generator=torch.Generator().manual_seed(seed)) < 0.7
    seen[0] = True
    visible = seen.nonzero()[:, 0].tolist()
    expected = sorted(sorted(visible, key=lambda place: -values[place])[:top_k])
    got = best_places(scores[None, None], seen[None, None], top_k)[0, 0]
    assert got.nonzero()[:, 0].tolist() == expected

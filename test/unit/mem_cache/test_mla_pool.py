"""The pool of latents and indexers' keys: places, moves that overlap, poison, sizes."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.mem_cache.mla_pool import MLAKVPool, MLAShape

DENSE, SPARSE = MLAShape(3, 10), MLAShape(3, 10, (0, 2), 4)
NUM_PAGES, PAGE_SIZE = 5, 4
shapes = pytest.mark.parametrize("shape", [DENSE, SPARSE], ids=["dense", "sparse"])


def filled(shape: MLAShape) -> MLAKVPool:
    pool = shape.make_pool(NUM_PAGES, PAGE_SIZE, torch.float32, "cpu")
    for tensor in pool.tensors:
        tensor.copy_(torch.randn_like(tensor))
    return pool


@shapes
def test_sizes(shape: MLAShape) -> None:
    pool = shape.make_pool(NUM_PAGES, PAGE_SIZE, torch.bfloat16, "cpu")
    assert pool.num_places == 24
    assert pool.bytes == shape.bytes_per_place(torch.bfloat16) * 24
    assert pool.bytes == 2 * 24 * (3 * 10 + (2 * 4 if shape is SPARSE else 0))
    assert pool.layer_latents(1).shape == (24, 10)
    assert all(float(tensor[:, :PAGE_SIZE].abs().max()) == 0 for tensor in pool.tensors)


def test_writes_reach_one_layer_and_the_named_places() -> None:
    pool = filled(SPARSE)
    latents, keys = pool.latents.clone(), pool.index_keys.clone()
    places, latent, key = torch.tensor([7, 20, 4]), torch.randn(3, 10), torch.randn(3, 4)
    pool.write(2, places, latent)
    pool.write_index_keys(2, places, key)
    latents[2, places], keys[1, places] = latent, key  # layer 2 has the second indexer
    assert torch.equal(pool.latents, latents) and torch.equal(pool.index_keys, keys)
    assert torch.equal(pool.layer_index_keys(2), keys[1])


@shapes
def test_move_gathers_before_it_writes_in_every_tensor(shape: MLAShape) -> None:
    pool = filled(shape)
    before = [tensor.clone() for tensor in pool.tensors]
    src, dst = torch.tensor([5, 6, 9, 8]), torch.tensor([4, 5, 6, 9])
    pool.move(src, dst)
    for tensor, old in zip(pool.tensors, before, strict=True):
        old[:, dst] = old[:, src]
        assert torch.equal(tensor, old)


@shapes
def test_poison_fills_whole_pages_and_only_them(shape: MLAShape) -> None:
    pool = filled(shape)
    pool.poison([2, 5])
    for tensor in pool.tensors:
        bad = tensor.isnan().all(-1)  # [layers, places]
        assert bad[:, 8:12].all() and bad[:, 20:24].all()
        assert tensor.isnan().sum() == bad.sum() * tensor.shape[-1] == 8 * tensor[:, 0].numel()

"""The KV pool: places, moves that overlap, poison."""

from __future__ import annotations

import torch

from sglang.srt.mem_cache.kv_pool import MHAKVPool


def make_pool(page_size: int = 4) -> MHAKVPool:
    return MHAKVPool(2, 5, page_size, 3, 8, torch.float32, "cpu")


def test_sizes() -> None:
    pool = make_pool()
    assert pool.num_places == 24
    assert pool.bytes == 2 * 24 * 3 * 2 * 8 * 4
    assert pool.keys(1).shape == pool.values(1).shape == (24, 3, 8)


def test_pad_page_is_finite_from_the_start() -> None:
    assert torch.equal(make_pool().kv[:, :4], torch.zeros(2, 4, 3, 2, 8))


def test_write_reaches_one_layer_and_the_named_places() -> None:
    pool = make_pool()
    pool.kv.zero_()
    k, v = torch.randn(3, 3, 8), torch.randn(3, 3, 8)
    places = torch.tensor([7, 20, 4])
    pool.write(1, places, k, v)
    assert torch.equal(pool.keys(1)[places], k) and torch.equal(pool.values(1)[places], v)
    assert pool.kv[0].abs().max() == 0
    others = [p for p in range(24) if p not in (7, 20, 4)]
    assert pool.kv[1, others].abs().max() == 0


def test_move_gathers_before_it_writes() -> None:
    pool = make_pool()
    pool.kv.copy_(torch.randn_like(pool.kv))
    before = pool.kv.clone()
    src, dst = torch.tensor([5, 6, 9, 8]), torch.tensor([4, 5, 6, 9])
    pool.move(src, dst)
    assert torch.equal(pool.kv[:, dst], before[:, src])
    untouched = [p for p in range(24) if p not in (4, 5, 6, 9)]
    assert torch.equal(pool.kv[:, untouched], before[:, untouched])


def test_move_of_places_onto_themselves() -> None:
    pool = make_pool()
    pool.kv.copy_(torch.randn_like(pool.kv))
    before = pool.kv.clone()
    places = torch.tensor([4, 5, 6])
    pool.move(places, places)
    assert torch.equal(pool.kv, before)


def test_poison_fills_whole_pages_and_only_them() -> None:
    pool = make_pool()
    pool.kv.zero_()
    pool.poison([2, 5])
    bad = pool.kv.isnan().all(-1).all(-1).all(-1)  # [layers, places]
    assert bad[:, 8:12].all() and bad[:, 20:24].all()
    assert pool.kv.isnan().sum() == 2 * 8 * 3 * 2 * 8
    pool.poison([])

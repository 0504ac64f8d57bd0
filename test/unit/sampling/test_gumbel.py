"""The noise: pinned bits, the right distribution, and no dependence between its three arguments."""

from __future__ import annotations

import math

import pytest
import torch

from sglang.srt.sampling.gumbel import noise, random_bits

LOW32 = 0xFFFFFFFF


def _mix(x: int) -> int:
    x ^= x >> 16
    x = x * 0x21F0AAAD & LOW32
    x ^= x >> 15
    x = x * 0x735A2D97 & LOW32
    return x ^ x >> 15


def _bits(seed: int, index: int, token: int) -> int:
    """The generator in plain integers."""
    left, right, counter = seed & LOW32, seed >> 32 & LOW32, index & LOW32
    for key in (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344):
        left, right = right, left ^ _mix((right + counter & LOW32) ^ key)
        counter = _mix(counter ^ key)
    x = token ^ left
    x ^= x >> 16
    x = x * 0x21F0AAAD & LOW32
    x ^= right
    x ^= x >> 15
    x = x * 0x735A2D97 & LOW32
    x ^= x >> 15
    x = x * 0x31848BAB & LOW32
    return x ^ x >> 16


def _t(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _uniform(seed: torch.Tensor, index: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return ((random_bits(seed, index, ids).long() & LOW32).double() + 0.5) / 2**32


def test_bits_are_those_of_plain_integers() -> None:
    seeds, indices, tokens = (0, 1, -1, 2**40 + 7, -(2**63), 2**63 - 1), (0, 1, 77, 2**31), (0, 1, 5, 163839)
    for seed in seeds:
        for index in indices:
            got = random_bits(_t(seed), _t(index), _t(*tokens))[0].long() & LOW32
            assert got.tolist() == [_bits(seed, index, token) for token in tokens]


def test_values_are_pinned() -> None:
    """A change of the generator changes every seeded text: it must be meant."""
    assert [_bits(42, 10, token) for token in (0, 1, 2)] == [2356291797, 1699973819, 3025507668]


def test_one_call_equals_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang.srt.sampling.gumbel._BLOCK_SIZE", 700)  # blocks of 7 rows
    seed, index, ids = torch.arange(20), torch.arange(20) + 3, torch.arange(100)
    whole = noise(seed, index, ids)
    for row in range(20):
        assert torch.equal(noise(seed[row : row + 1], index[row : row + 1], ids)[0], whole[row])
    scattered = _t(99, 3, 50)
    assert torch.equal(noise(seed, index, scattered), whole[:, scattered])
    assert torch.equal(noise(seed, index, scattered.expand(20, 3)), whole[:, scattered])
    assert torch.equal(noise(seed, index, ids.int()), whole)


def test_float32_noise_is_the_float64_formula() -> None:
    seed, index, ids = torch.arange(20), torch.arange(20), torch.arange(50_000)
    exact = -torch.log(-torch.log1p(-_uniform(seed, index, ids)))
    got = noise(seed, index, ids)
    assert got.dtype == torch.float32 and bool(got.isfinite().all())
    error = (got.double() - exact).abs()
    winners = exact > 0
    assert error[winners].max() < 2e-6  # full resolution where it decides
    assert error[exact > -2].max() < 1e-5


@pytest.mark.parametrize("bits", [0, 1, 2**31 - 1, -(2**31), -1])
def test_extreme_bits_give_finite_noise(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = torch.tensor([[bits]], dtype=torch.int32)
    monkeypatch.setattr("sglang.srt.sampling.gumbel.random_bits", lambda *_: fixed.clone())
    value = float(noise(_t(0), _t(0), _t(0)))
    u = ((bits & LOW32) + 0.5) / 2**32
    exact = -math.log(-math.log1p(-min(u, 1 - 2**-24)))
    assert math.isfinite(value) and abs(value - exact) < 1e-5


def _chi_square_is_fine(counts: torch.Tensor, expected: torch.Tensor) -> bool:
    keep = expected >= 5
    statistic = float(((counts - expected) ** 2 / expected)[keep].sum())
    degrees = int(keep.sum()) - 1
    return statistic < degrees + 5 * math.sqrt(2 * degrees)


@pytest.mark.parametrize("varied", ["seed", "index", "token"])
def test_uniform_over_each_argument(varied: str) -> None:
    n, count = torch.arange(200_000), 200_000
    if varied == "token":
        u = _uniform(_t(7), _t(3), n)[0]
    elif varied == "seed":
        u = _uniform(n, torch.full_like(n, 3), _t(11))[:, 0]
    else:
        u = _uniform(torch.full_like(n, 7), n, _t(11))[:, 0]
    bins = torch.bincount((u * 1000).long(), minlength=1000).double()
    assert _chi_square_is_fine(bins, torch.full((1000,), count / 1000).double())
    low_bits = torch.bincount((u * 2**32).long() & 255, minlength=256).double()
    assert _chi_square_is_fine(low_bits, torch.full((256,), count / 256).double())


NEIGHBOURS = {
    "next token": lambda s, i, t: (s, i, t + 1),
    "next index": lambda s, i, t: (s, i + 1, t),
    "next seed": lambda s, i, t: (s + 1, i, t),
    "far token": lambda s, i, t: (s, i, t + 16384),
    "seed and index": lambda s, i, t: (s + 1, i - 1, t),
    "index and token": lambda s, i, t: (s, i + 1, t - 1),
    "high seed bits": lambda s, i, t: (s + 2**32, i, t),
}


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_neighbours_are_independent(name: str) -> None:
    """Pairs of neighbouring draws fill a 16 x 16 grid evenly."""
    seed, index, ids = torch.arange(64) * 977, torch.arange(64) % 8 + 100, torch.arange(4096)
    first = _uniform(seed, index, ids)
    second = _uniform(*NEIGHBOURS[name](seed, index, ids))
    cell = (first * 16).long() * 16 + (second * 16).long()
    counts = torch.bincount(cell.flatten(), minlength=256).double()
    assert _chi_square_is_fine(counts, torch.full((256,), first.numel() / 256).double())


@pytest.mark.parametrize("varied", ["seed", "index"])
def test_argmax_draws_from_the_softmax(varied: str) -> None:
    logits = torch.linspace(-3, 3, 40)
    n = torch.arange(60_000)
    seed, index = (n, torch.full_like(n, 9)) if varied == "seed" else (torch.full_like(n, 9), n)
    chosen = (logits + noise(seed, index, torch.arange(40))).argmax(dim=1)
    counts = torch.bincount(chosen, minlength=40).double()
    assert _chi_square_is_fine(counts, logits.double().softmax(0) * len(n))


def test_consecutive_choices_are_independent() -> None:
    """The pair (choice at index i, choice at i + 1) of one seed has the product distribution."""
    logits = torch.linspace(-1, 1, 8)
    n = torch.arange(40_000)
    first, second = (
        (logits + noise(n, torch.full_like(n, i), torch.arange(8))).argmax(dim=1) for i in (20, 21)
    )
    p = logits.double().softmax(0)
    counts = torch.bincount(first * 8 + second, minlength=64).double()
    assert _chi_square_is_fine(counts, torch.outer(p, p).flatten() * len(n))

"""NVFP4 activations: properties of the reference, and the layout of scales against a formula of its own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_kernel.fp4.layout import in_tiles, padded_size
from sgl_kernel.fp4.reference import (
    BLOCK,
    LARGEST_SCALE,
    Quantised,
    e2m1_codes,
    fake_quantise,
    product,
    quantise,
)
from sgl_kernel.moe.weights import E2M1

SEEDS = st.integers(0, 2**31)


def one(value: float) -> torch.Tensor:
    return torch.tensor(value)


def test_every_e2m1_value_is_its_own_code_and_ties_go_to_even_ones() -> None:
    values = torch.tensor(E2M1)
    assert e2m1_codes(values).tolist() == list(range(8))
    assert e2m1_codes(-values).tolist() == list(range(8, 16))  # 0 too has a sign
    middles = (values[:-1] + values[1:]) / 2
    assert e2m1_codes(middles).tolist() == [0, 2, 2, 4, 4, 6, 6]
    up, down = torch.nextafter(middles, one(9)), torch.nextafter(middles, one(0))
    assert e2m1_codes(up).tolist() == list(range(1, 8)) and e2m1_codes(down).tolist() == list(range(7))
    assert e2m1_codes(torch.tensor([1e30, torch.inf, -1e30])).tolist() == [7, 7, 15]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=64))
def test_the_nearest_value_is_taken(numbers: list[float]) -> None:
    x = torch.tensor(numbers)
    signed = torch.tensor((*E2M1, *(-v for v in E2M1)))
    best = (x[:, None].double() - signed.double()).abs().amin(1)
    assert torch.equal((x.double() - signed[e2m1_codes(x).int()].double()).abs(), best)


@settings(max_examples=30, deadline=None)
@given(seed=SEEDS, exponent=st.integers(-20, 20), largest=st.floats(0.01, 100))
def test_errors_are_bounded_by_block(seed: int, exponent: int, largest: float) -> None:
    """A step of e2m1 is at most a third of the block's largest value (4 to 6: half of it), and e4m3 rounds a
    scale by a sixteenth, or by half its smallest step."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 64, generator=g) * torch.rand(3, 1, generator=g) * 2.0**exponent
    seen = float(x.abs().max()) * largest  # when the checkpoint was made; less than x has: cut off
    by = one(6 * LARGEST_SCALE / seen)
    got = fake_quantise(x, by)
    most = x.abs().unflatten(1, (-1, BLOCK)).amax(2).repeat_interleave(BLOCK, 1)
    cut = (most - seen).clamp(min=0)
    smallest = 6 * 2.0**-10 / float(by)
    assert ((got - x).abs() <= most / 6 + most / 16 + cut + smallest + 1e-6 * most).all()
    assert (got * x >= 0).all(), "no sign changes"


@settings(max_examples=30, deadline=None)
@given(seed=SEEDS, power=st.integers(-6, 8), by=st.integers(-8, 8))
def test_what_can_be_written_is_exact(seed: int, power: int, by: int) -> None:
    """Blocks that hold a 6, times a power of 2 that a scale has."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 8, (2, 4, BLOCK), generator=g)
    codes[..., 0] = 7
    signs = torch.randint(0, 2, codes.shape, generator=g) * 2.0 - 1
    x = (torch.tensor(E2M1)[codes] * signs).flatten(1) * 2.0 ** (power - by)
    quantised = quantise(x, one(2.0**by))
    assert torch.equal(quantised.values() / 2.0**by, x)
    assert (quantised.scale.float() == 2.0**power).all()


def test_zeros_stay_zeros_and_too_much_is_cut_off() -> None:
    x = torch.zeros(2, 32)
    x[1, 3], x[1, 20] = 1000.0, -1e-30
    quantised = quantise(x, one(6 * LARGEST_SCALE))  # the largest seen was 1
    assert not quantised.codes[0].any() and not quantised.scale[0].view(torch.uint8).any()
    got = fake_quantise(x, one(6 * LARGEST_SCALE))
    assert got[1, 3] == 1 and got[1, 20] == 0 and torch.isfinite(got).all()
    assert (got[1].abs() > 0).sum() == 1


@settings(max_examples=10, deadline=None)
@given(seed=SEEDS)
def test_a_product_is_that_of_what_the_codes_stand_for(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    a, b = (quantise(torch.randn(rows, 64, generator=g), one(300.0)) for rows in (3, 5))
    expected = (a.values().double() / 300) @ (b.values().double() / 300).t()
    got = product(a, b, one(1 / 300.0**2))
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    whole = quantise(x, one(50.0))
    for row in range(len(x)):
        alone = quantise(x[row : row + 1], one(50.0))
        assert torch.equal(alone.codes[0], whole.codes[row])
        assert torch.equal(alone.scale.view(torch.uint8)[0], whole.scale.view(torch.uint8)[row])


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 300), columns=st.integers(1, 19), experts=st.sampled_from([None, 1, 3]))
def test_tiles_by_the_formula_of_a_place(rows: int, columns: int, experts: int | None) -> None:
    shape = (rows, columns) if experts is None else (experts, rows, columns)
    g = torch.Generator().manual_seed(rows * 31 + columns)
    scale = torch.randint(1, 127, shape, generator=g).to(torch.uint8)
    got = in_tiles(scale.view(torch.float8_e4m3fn))
    num_rows, num_columns = padded_size(rows, columns)
    assert got.shape == (*shape[:-2], num_rows, num_columns) and got.is_contiguous()
    r, c = torch.arange(rows)[:, None], torch.arange(columns)
    tile = (r // 128) * (num_columns // 4) + c // 4
    place = tile * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4  # [N, G]
    for own, tiled in zip(scale.view(-1, rows, columns), got.view(-1, num_rows * num_columns), strict=True):
        expected = torch.zeros_like(tiled)
        expected[place.flatten()] = own.flatten()
        assert torch.equal(tiled, expected)


def test_packing_puts_the_even_column_low() -> None:
    x = torch.zeros(1, 16)
    x[0, 0], x[0, 1] = 6.0, -3.0
    assert quantise(x, one(1.0)).codes[0, 0] == 7 + 16 * 13
    codes = torch.tensor([[7 + 16 * 13] + [0] * 7], dtype=torch.uint8)
    values = Quantised(codes, torch.ones(1, 1).to(torch.float8_e4m3fn)).values()
    assert values[0, :2].tolist() == [6.0, -3.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_any_type_of_input_is_quantised_as_float32(dtype: torch.dtype) -> None:
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(2)).to(dtype)
    assert torch.equal(quantise(x, one(90.0)).codes, quantise(x.float(), one(90.0)).codes)

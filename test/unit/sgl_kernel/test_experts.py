"""Experts: formats against their definitions, kernels against references, compiled at real shapes."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

from helpers.expert_matrices import meta_matrix, random_matrix, with_bias
from helpers.ptx_pairs import run_pairs

from sgl_kernel._dispatch import H200, RTX_PRO_6000, DeviceInfo
from sgl_kernel.launch import Launch
from sgl_kernel.moe import ops
from sgl_kernel.moe.config import ExpertsConfig, ProductConfig, experts_config, pairs_config
from sgl_kernel.moe.grouping import num_blocks, sort_pairs
from sgl_kernel.moe.ops import (
    combine_launch,
    expert_counters,
    fused_experts,
    interleave_launch,
    make_hidden,
    make_routed,
    product_launch,
    route_launch,
)
from sgl_kernel.moe.pairs import down_launch, gate_up_launch
from sgl_kernel.moe.reference import fused_experts_ref, route_ref
from sgl_kernel.moe.unpacking.ptx import int4_program, nvfp4_program
from sgl_kernel.moe.weights import E2M1, MXFP4_LARGEST, PACKED, ExpertMatrix, Format
from sgl_kernel.testing.compile_gate import check
from sgl_kernel.testing.interpret import interpret

PLAIN, INT4, NVFP4, MXFP4, FP8 = Format.PLAIN, Format.INT4, Format.NVFP4, Format.MXFP4, Format.FP8


def routing(num_tokens: int, num_experts: int, top_k: int, seed: int, padded: int = 0) -> torch.Tensor:
    """[T, k] int64, no expert twice in a row; -1 in the last ``padded`` rows."""
    generator = torch.Generator().manual_seed(seed)
    experts = torch.rand(num_tokens, num_experts, generator=generator).topk(top_k).indices
    experts[num_tokens - padded :] = -1
    return experts


def told(blocks: torch.Tensor) -> set[tuple[int, ...]]:
    """Blocks with something to do, wherever they lie."""
    return {tuple(fields) for fields in blocks.tolist() if fields[0] >= 0}


def body_routing() -> None:
    """Where pairs lie, and the rows of x in the order of packed words; by counting and by sorting."""
    for num_tokens, num_experts, top_k, block_m, padded in (
        (1, 8, 8, 16, 0), (7, 5, 3, 16, 2), (20, 2, 1, 16, 1), (3, 2, 1, 16, 3), (25, 6, 4, 8, 2),
    ):  # fmt: skip
        experts = routing(num_tokens, num_experts, top_k, num_tokens, padded)
        gate_up = random_matrix(INT4, num_experts, 64, 96, seed=0)
        product = ProductConfig(32, 4, 1, 4, 3, False)
        config = ExpertsConfig(block_m, product, product)
        x = torch.randn(num_tokens, 96)
        blocks, order = route_ref(experts, block_m)
        # 12 words of 8 columns, by passes of 4: first all words' nibble 0, then 1, …
        expected = x.view(num_tokens, 3, 4, 8).transpose(2, 3).flatten(1)
        routed = make_routed(x, experts, gate_up, config)
        route_launch(x, experts, routed, gate_up, config, False).run()
        assert torch.equal(routed.order, order) and told(routed.blocks) == told(blocks)
        assert torch.equal(routed.x, expected)
        most = num_blocks(experts.numel(), num_experts, block_m)
        assert len(routed.blocks) == min(most, experts.numel())
        sorted_blocks, order_again = torch.empty(most, 3, dtype=torch.int32), torch.empty_like(order)
        sort_pairs(experts, num_experts, block_m, sorted_blocks, order_again)
        assert torch.equal(order_again, order) and told(sorted_blocks) == told(blocks)
        routed.x.zero_()
        interleave_launch(x, routed, gate_up, config, False).run()
        assert torch.equal(routed.x, expected)


def compare(
    formats: tuple[Format, Format],
    sizes: tuple[int, int, int],
    tokens: tuple[int, int],
    config: ExpertsConfig | None = None,
    padded: int = 0,
    with_base: bool = False,
    again: bool = False,
    block: tuple[int, int] = (128, 128),
    by_pair: bool = False,
    as_gpt_oss: bool = False,
) -> None:
    """sizes: E, H, I; tokens: T, k. ``again``: twice, with the same counters. ``as_gpt_oss``: biases, and its
    activation."""
    (num_experts, hidden, inter), (num_tokens, top_k) = sizes, tokens
    gate_up = random_matrix(formats[0], num_experts, 2 * inter, hidden, seed=1, parts=2, block=block)
    down = random_matrix(formats[1], num_experts, hidden, inter, seed=2, block=block)
    if as_gpt_oss:
        gate_up, down = with_bias(gate_up, 5), with_bias(down, 6, torch.bfloat16)
    experts = routing(num_tokens, num_experts, top_k, 3, padded)
    generator = torch.Generator().manual_seed(4)
    counters = expert_counters("cpu")
    for _ in range(2 if again else 1):
        x = torch.randn(num_tokens, hidden, generator=generator)
        weights = torch.rand(num_tokens, top_k, generator=generator)
        base = torch.randn(num_tokens, hidden, generator=generator) if with_base else None
        got = fused_experts(
            x, weights, experts, gate_up, down, base=base, config=config, counters=counters, by_pair=by_pair,
            clamped=as_gpt_oss,
        )  # fmt: skip
        expected = fused_experts_ref(x, weights, experts, gate_up, down, base, as_gpt_oss)
        assert not counters.any()
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def body_products() -> None:
    """Every format; columns that fill no pass; splits; several blocks of an expert; padded rows."""
    wide = ProductConfig(64, 8, 1, 4, 2, False)
    split = ProductConfig(32, 4, 3, 4, 2, False)
    compare((INT4, INT4), (4, 64, 32), (1, 2))
    compare((NVFP4, NVFP4), (4, 64, 96), (5, 2))  # narrower than any pass: an eighth of 768
    compare((INT4, INT4), (3, 96, 96), (3, 2), ExpertsConfig(16, wide, wide), padded=1, with_base=True)
    compare((INT4, INT4), (1, 96, 32), (18, 1), ExpertsConfig(16, split, wide), again=True)
    compare((NVFP4, NVFP4), (5, 128, 64), (2, 2), ExpertsConfig(16, wide, wide))
    plain = ProductConfig(16, 32, 2, 4, 2, False)
    in_turn = replace(wide, row_tiles=2)  # 5 tiles of 64 rows, of 64 columns in one pass
    compare((INT4, INT4), (2, 320, 64), (2, 2), ExpertsConfig(8, wide, in_turn), padded=1)
    compare((NVFP4, NVFP4), (2, 160, 32), (2, 1), ExpertsConfig(8, wide, in_turn))
    compare((PLAIN, PLAIN), (6, 40, 24), (2, 2), ExpertsConfig(16, plain, plain), with_base=True)
    compare((PLAIN, INT4), (3, 64, 64), (1, 1), ExpertsConfig(16, plain, wide))


def body_pairs() -> None:
    """A program for each pair: every format, splits, one pass and several, padded rows."""
    wide = ProductConfig(64, 8, 1, 4, 2, False)
    split = ProductConfig(32, 4, 3, 4, 2, False)
    plain = ProductConfig(16, 32, 2, 4, 2, False)
    pairs = partial(compare, by_pair=True, with_base=True)
    pairs((INT4, INT4), (3, 96, 64), (3, 2), ExpertsConfig(8, split, wide), padded=1, again=True)
    pairs((INT4, INT4), (2, 96, 96), (1, 2), ExpertsConfig(8, wide, wide))
    pairs((INT4, INT4), (4, 64, 96), (1, 2))
    pairs((NVFP4, NVFP4), (2, 128, 32), (2, 1), ExpertsConfig(8, wide, wide))
    pairs((PLAIN, PLAIN), (2, 40, 24), (1, 2), ExpertsConfig(8, plain, plain))
    pairs((FP8, FP8), (2, 136, 40), (1, 1), ExpertsConfig(8, plain, plain), block=(32, 128))


def body_gpt_oss() -> None:
    """MXFP4 and plain weights with biases and the clamped activation, every way through."""
    wide, split = ProductConfig(64, 8, 1, 4, 2, False), ProductConfig(32, 4, 2, 4, 2, False)
    plain = ProductConfig(16, 32, 2, 4, 2, False)
    same = partial(compare, as_gpt_oss=True)
    same((MXFP4, MXFP4), (3, 96, 96), (3, 2), ExpertsConfig(8, split, wide), padded=1, with_base=True)
    same((MXFP4, MXFP4), (2, 160, 64), (2, 1), ExpertsConfig(8, wide, replace(wide, row_tiles=2)))
    same((PLAIN, PLAIN), (2, 40, 24), (2, 2), ExpertsConfig(16, plain, plain))
    same((MXFP4, MXFP4), (2, 96, 64), (2, 1), ExpertsConfig(8, split, wide), by_pair=True, again=True)
    same((PLAIN, PLAIN), (2, 40, 24), (1, 2), ExpertsConfig(8, plain, plain), by_pair=True)


def body_float8() -> None:
    """Blocks that are cut, rows and whole matrices; columns that fill no pass; splits."""
    wide, split = ProductConfig(32, 64, 1, 4, 2, False), ProductConfig(32, 32, 2, 4, 2, False)
    compare((FP8, FP8), (2, 128, 64), (2, 1), ExpertsConfig(16, wide, wide), with_base=True, block=(64, 64))
    compare((FP8, FP8), (1, 136, 40), (1, 1), ExpertsConfig(16, split, split), block=(32, 128))
    compare((FP8, FP8), (2, 64, 48), (2, 2), ExpertsConfig(16, wide, wide), block=(1, 10**6))
    compare((FP8, INT4), (2, 64, 32), (2, 1), ExpertsConfig(16, split, wide), block=(10**6, 10**6))


def body_many() -> None:
    """Compact blocks; tokens that are sorted; several passes, with base; products that are rounded."""
    product = ProductConfig(32, 4, 1, 4, 2, False)
    plain = ProductConfig(16, 32, 1, 4, 2, False)
    config = ExpertsConfig(16, product, product)
    sizes = (2, 32, 32)
    compare((INT4, INT4), sizes, (40, 2), config, padded=3, with_base=True)  # 80 pairs, 7 blocks
    before = ops.MAX_COUNTED, ops.MAX_TOKENS, ops.MAX_FLOAT_PRODUCTS
    ops.MAX_COUNTED, ops.MAX_TOKENS, ops.MAX_FLOAT_PRODUCTS = 8, 24, 1
    compare((INT4, INT4), sizes, (33, 2), config, padded=3, with_base=True)
    compare((PLAIN, PLAIN), (3, 40, 24), (17, 2), ExpertsConfig(16, plain, plain))
    ops.MAX_COUNTED, ops.MAX_TOKENS, ops.MAX_FLOAT_PRODUCTS = before


def body_alone() -> None:
    """A token's result is bit for bit the same whoever is beside it in the same tile, and where it is NaN."""
    gate_up, down = random_matrix(INT4, 4, 128, 64, seed=1), random_matrix(INT4, 4, 64, 64, seed=2)
    product = ProductConfig(64, 8, 1, 4, 2, False)
    config = ExpertsConfig(16, product, product)
    x, weights, experts = torch.randn(6, 64), torch.rand(6, 1), routing(6, 2, 1, 0)
    together = fused_experts(x, weights, experts, gate_up, down, config=config)
    x[3] = torch.nan
    broken = fused_experts(x, weights, experts, gate_up, down, config=config)
    assert broken[3].isnan().all()
    for token in (0, 1, 2, 4, 5):
        assert torch.equal(broken[token], together[token])


def body_all(names: list[str]) -> None:
    for name in names:
        globals()[f"body_{name}"]()


def body_some() -> None:
    """A case of each way through; the long run has all."""
    wide, split = ProductConfig(64, 8, 1, 4, 2, False), ProductConfig(32, 4, 3, 4, 2, False)
    compare((INT4, INT4), (2, 96, 64), (3, 1), ExpertsConfig(8, split, wide), padded=1, with_base=True)
    config = ExpertsConfig(8, split, replace(wide, block_n=32))
    compare((INT4, NVFP4), (2, 96, 32), (2, 2), config, padded=1, with_base=True, by_pair=True, again=True)
    plain = ProductConfig(32, 64, 2, 4, 2, False)
    compare((FP8, PLAIN), (2, 128, 40), (1, 1), ExpertsConfig(16, plain, plain), block=(64, 64))
    config = ExpertsConfig(8, split, split)
    compare((MXFP4, MXFP4), (2, 96, 32), (3, 1), config, padded=1, as_gpt_oss=True)


def test_kernels_equal_references() -> None:
    interpret(__file__, "body_all", names=["routing", "some"])


@pytest.mark.long
@pytest.mark.parametrize("name", ["alone", "products", "pairs", "float8", "many", "gpt_oss"])
def test_all_kernels_equal_references(name: str) -> None:
    interpret(__file__, f"body_{name}")


def test_the_formats_are_what_they_say() -> None:
    """One weight at a time, by the definitions."""
    for form, group in ((INT4, 32), (NVFP4, 16), (MXFP4, 32)):
        matrix = random_matrix(form, 2, 4, 64, seed=5, parts=2)
        assert matrix.scale is not None
        for expert in range(2):
            made = matrix.dequantise(expert, torch.float64)
            for row in range(4):
                for column in range(64):
                    word = int(matrix.data[expert, row, column // 8]) & 0xFFFFFFFF
                    code = word >> (4 * (column % 8)) & 15
                    scale = float(matrix.scale[expert, row, column // group])
                    value = E2M1[code & 7] * (-1 if code & 8 else 1)
                    if form is INT4:
                        assert made[row, column] == (code - 8) * scale
                    elif form is MXFP4:
                        assert made[row, column] == value * 2 ** (scale - 127)
                    else:
                        assert matrix.global_scale is not None
                        own = float(matrix.global_scale[expert, row // 2])
                        assert made[row, column] == value * scale * own


def test_scales_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="a scale for every 32 columns"):
        ExpertMatrix(INT4, torch.zeros(1, 4, 8, dtype=torch.int32), torch.ones(1, 4, 3))


@pytest.mark.parametrize("program", ["int4", "nvfp4", "mxfp4"])
def test_ptx_makes_the_weights_of_every_code(program: str) -> None:
    """All 16 codes in every nibble, with scales of all sizes: what the program says, carried out here."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**31), 2**31, (2, 4096), generator=generator)
    scale = (torch.randn(2, 4096, generator=generator) * 0.02).bfloat16()
    if program == "int4":
        got = run_pairs(int4_program(), words & 0xFFFFFFFF, scale)  # [8, 2, 4096] bfloat16
    elif program == "mxfp4":
        exponents = torch.randint(0, MXFP4_LARGEST + 1, scale.shape, generator=generator)
        given = ((exponents + 126) << 7).to(torch.int16).view(torch.bfloat16)  # as the kernel makes it
        scale = torch.exp2(exponents.float() - 127)
        got = run_pairs(nvfp4_program(), words & 0xFFFFFFFF, given)
    else:
        bits = torch.randint(1, 127, scale.shape, generator=generator).to(torch.uint8)  # of all sizes
        scale = bits.view(torch.float8_e4m3fn).bfloat16()
        got = run_pairs(nvfp4_program(), words & 0xFFFFFFFF, scale * 2.0**118).double() * 2.0**8
    for i in range(8):
        codes = (words >> (4 * i)) & 15
        assert len(codes.unique()) == 16
        if program == "int4":
            value = (codes - 8).float()
        else:
            value = torch.tensor((*E2M1, *(-v for v in E2M1)))[codes]
        assert torch.equal(got[i].float(), (value * scale.float()).bfloat16().float())


# ---- compiled for GPUs ----------------------------------------------------------------------------

KIMI = (384, 7168, 2048, 8)  # experts, hidden, intermediate, top k
GLM5 = (256, 6144, 2048, 8)
GPT_OSS = (128, 2880, 2880, 4)
DEVICES = pytest.mark.parametrize("info", [H200, RTX_PRO_6000], ids=lambda info: f"sm_{info.arch}")


def meta_experts(
    form: Format, model: tuple[int, int, int, int], ranks: int
) -> tuple[ExpertMatrix, ExpertMatrix]:
    num_experts, hidden, inter, _ = model
    gate_up = meta_matrix(form, num_experts, 2 * inter // ranks, hidden, parts=2)
    down = meta_matrix(form, num_experts, hidden, inter // ranks)
    if model is not GPT_OSS:
        return gate_up, down
    return with_bias(gate_up, 0, torch.bfloat16), with_bias(down, 0, torch.bfloat16)


def launches(
    form: Format, model: tuple[int, int, int, int], ranks: int, tokens: int, info: DeviceInfo
) -> list[Launch]:
    """Of a layer, as one of so many ranks has it: routing, gate and up, down, the sum."""
    num_experts, hidden, inter, top_k = model
    gate_up, down = meta_experts(form, model, ranks)
    x = torch.empty(tokens, hidden, dtype=torch.bfloat16, device="meta")
    experts = torch.empty(tokens, top_k, dtype=torch.int64, device="meta")
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device="meta")
    config = experts_config(info, tokens, top_k, gate_up, down)
    routed = make_routed(x, experts, gate_up, config)
    middle = make_hidden(routed, x.dtype, down, config)
    products = torch.empty(tokens * top_k, hidden, device="meta")
    counters, words = expert_counters("meta"), config.down.width if form in PACKED else 0
    return [
        route_launch(x, experts, routed, gate_up, config, True),
        product_launch(
            routed.x, gate_up, routed, middle, config, counters, True, gated=True, out_words=words,
            clamped=model is GPT_OSS,
        ),
        product_launch(middle, down, routed, products, config, counters, True, gated=False),
        combine_launch(products, weights, experts, x, x, True),
    ]  # fmt: skip


def gate(launch: Launch, info: DeviceInfo) -> None:
    (made,) = check(launch, archs=(info.arch,))
    if "FORMAT" not in launch.constants:
        return
    print(
        f"format {launch.constants['FORMAT']} {launch.constants['N']}x{launch.constants['K']}"
        f" tile {launch.constants['BM']} split {launch.constants.get('SPLIT', 1)} sm_{info.arch}:"
        f" {made.shared} B, {made.registers} registers,"
        f" {made.programs_per_sm(launch.num_warps)} programs a SM"
    )
    assert made.programs_per_sm(launch.num_warps) >= 2
    if launch.constants["FORMAT"] in (0, 3):
        return
    # A word goes from shared memory into the registers of its product and is unpacked there.
    loop = made.ttgir[made.ttgir.index("scf.for") :].split("scf.yield")[0]
    moved = re.findall(r"ttg\.(?:convert_layout|local_store).*", loop)  # sums on their way out may be
    assert not [line for line in moved if "bf16" in line or "xi32" in line], moved
    reads = re.findall(r"ttg\.local_load .*xi32, .*-> tensor<\d+x\d+xi32, (.*)> loc", loop)
    assert reads and all(layout.startswith("#ttg.dot_op") for layout in reads)
    assert "0x10" in set(re.findall(r"cp\.async\.c[ag]\.shared\.global.*?(0x\w+),", made.ptx))


def pair_launches(
    form: Format, model: tuple[int, int, int, int], ranks: int, tokens: int, info: DeviceInfo
) -> list[Launch]:
    """Of a layer for few tokens: gate and up; down and the sum."""
    num_experts, hidden, inter, top_k = model
    gate_up, down = meta_experts(form, model, ranks)
    x = torch.empty(tokens, hidden, dtype=torch.bfloat16, device="meta")
    experts = torch.empty(tokens, top_k, dtype=torch.int32, device="meta")
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device="meta")
    middle = torch.empty(tokens * top_k, inter // ranks, dtype=torch.bfloat16, device="meta")
    config, counters = pairs_config(info, tokens, top_k, gate_up, down), expert_counters("meta")
    return [
        gate_up_launch(x, experts, gate_up, middle, config, counters, True, model is GPT_OSS),
        down_launch(middle, weights, experts, down, x, x, config, counters, True),
    ]


def gate_pairs(launch: Launch, info: DeviceInfo) -> None:
    (made,) = check(launch, archs=(info.arch,))
    assert made.programs_per_sm(launch.num_warps) >= 3


@DEVICES
def test_kimis_pairs_fit(info: DeviceInfo) -> None:
    for launch in pair_launches(INT4, KIMI, 8, 1, info):
        gate_pairs(launch, info)


@DEVICES
@pytest.mark.parametrize("form", [INT4, NVFP4], ids=lambda form: form.value)
def test_experts_narrower_than_a_pass_compile(form: Format, info: DeviceInfo) -> None:
    """96 columns are Qwen3-30B-A3B's as one of 8 ranks has them; a product of 12 words has no instruction."""
    model = (16, 64, 96, 2)
    for launch in (pair_launches(form, model, 1, 1, info)[1], launches(form, model, 1, 4, info)[2]):
        check(launch, archs=(info.arch,))


@DEVICES
def test_kimis_gate_and_up_fit(info: DeviceInfo) -> None:
    gate(launches(INT4, KIMI, 8, 4, info)[1], info)


@pytest.mark.long
@DEVICES
@pytest.mark.parametrize("form", [MXFP4, PLAIN], ids=lambda form: form.value)
def test_all_sizes_of_gpt_oss_fit(form: Format, info: DeviceInfo) -> None:
    for ranks in (1, 9):  # 320 of an expert's 2880 rows, whole groups
        for tokens in (1, 16, 128, 2048):
            for launch in launches(form, GPT_OSS, ranks, tokens, info):
                gate(launch, info)
        for launch in pair_launches(form, GPT_OSS, ranks, 4, info):
            gate_pairs(launch, info)


@pytest.mark.long
@DEVICES
@pytest.mark.parametrize("form", list(Format), ids=lambda form: form.value)
def test_all_sizes_fit(form: Format, info: DeviceInfo) -> None:
    for model in (KIMI, GLM5):
        for tokens in (1, 16, 512, 2048):
            for launch in launches(form, model, 8, tokens, info):
                gate(launch, info)
        for launch in pair_launches(form, model, 8, 4, info):
            gate_pairs(launch, info)
    for launch in launches(form, KIMI, 1, 1, info):
        gate(launch, info)
    for launch in pair_launches(form, KIMI, 1, 1, info):
        gate_pairs(launch, info)

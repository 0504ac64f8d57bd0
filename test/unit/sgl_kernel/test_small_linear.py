"""Products of few rows: numerics against float64 in the interpreter, the table of choices, compilation of
every variant at the shapes of Llama-8B and SmolLM2."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sgl_kernel._dispatch import H200, RTX_PRO_6000
from sgl_kernel.linear.ops import Fusion, InputNorm, linear_launch, small_linear, split_counters
from sgl_kernel.linear.variants import TORCH, ChoiceTable, Problem, Variant, candidates, default_variant
from sgl_kernel.testing.compile_gate import check, compile_launch
from sgl_kernel.testing.interpret import interpret

BF16 = torch.bfloat16


def _draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def _wanted(x: torch.Tensor, weight: torch.Tensor, fusion: Fusion) -> torch.Tensor:
    """In float64, without any rounding between."""
    x, weight = x.double(), weight.double()
    if fusion.norm is not None:
        scale = (x.pow(2).mean(-1, keepdim=True) + fusion.norm.eps).rsqrt()
        x = x * scale * fusion.norm.weight.double()
    y = x @ weight.t()
    if fusion.gated:
        gate, up = y.chunk(2, dim=-1)
        y = gate * gate.sigmoid() * up
    for term in (fusion.bias, fusion.residual):
        y = y if term is None else y + term.double()
    return y


def _fusion(kind: str, rows: int, n: int, k: int, dtype: torch.dtype) -> Fusion:
    norm = InputNorm(_draw(k, dtype=dtype, seed=7), 1e-5)
    return {
        "plain": Fusion(),
        "norm": Fusion(norm=norm, bias=_draw(n, dtype=dtype, seed=9)),
        "residual": Fusion(residual=_draw(rows, n, dtype=dtype, seed=8)),
        "gated": Fusion(norm=norm, gated=True),
    }[kind]


def _check(kind: str, rows: int, n: int, k: int, variant: Variant | None, dtype: torch.dtype) -> None:
    fusion = _fusion(kind, rows, n, k, dtype)
    x = _draw(rows, k, dtype=dtype, seed=1)
    weight = _draw(n * (2 if fusion.gated else 1), k, dtype=dtype, seed=2, scale=k**-0.5)
    wanted = _wanted(x, weight, fusion)
    in_place = fusion.residual  # the residual stream is changed in place
    counters = split_counters("cpu")
    got = small_linear(x, weight, fusion, out=in_place, variant=variant, counters=counters)
    assert not counters.any(), "left as they were found"
    tolerance = 2e-5 if dtype == torch.float32 else 2**-5
    torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance)
    if kind == "plain":
        wide = small_linear(x, weight, variant=variant, out_dtype=torch.float32)
        torch.testing.assert_close(wide.double(), wanted, rtol=2e-5, atol=2e-5)


def body_second_tiles(kinds: list[str]) -> None:
    """140 tiles: 8 of 132 programs take a second one."""
    for kind in kinds:
        _check(kind, 1, 279, 48, Variant("gemv", block_n=2, num_warps=1, programs_per_sm=1), torch.float32)


def body_numerics() -> None:
    gemvs = (Variant("gemv", block_n=4, num_warps=1), Variant("gemv", block_n=8, num_warps=2))
    gemms = (Variant("gemm", 16, 32, 1, 2), Variant("gemm", 32, 64, 2, 3), Variant("gemm", 16, 64, 3, 2))
    for kind in ("plain", "norm", "residual", "gated"):
        _check(kind, 1, 24, 192, gemvs[0], torch.float32)
        _check(kind, 1, 20, 128, gemvs[1], torch.float32)  # 20 rows of weights in blocks of 8; K of 128
        _check(kind, 5, 40, 192, gemms[0], torch.float32)
        _check(kind, 19, 40, 192, gemms[1], torch.float32)  # 3 steps in 2 splits
        _check(kind, 3, 48, 192, gemms[2], torch.float32)
    _check("gated", 1, 24, 192, gemvs[0], BF16)
    _check("norm", 3, 48, 192, gemms[1], torch.float16)
    body_second_tiles(["gated"])


def body_reference() -> None:
    for kind in ("plain", "norm", "residual", "gated"):
        for dtype in (torch.float32, BF16):
            _check(kind, 3, 40, 192, None, dtype)


def test_the_reference_is_the_product() -> None:
    body_reference()


def test_kernels_are_the_product() -> None:
    pytest.importorskip("triton", reason="kernels need triton")
    interpret(__file__, "body_numerics")


@pytest.mark.long
def test_programs_take_second_tiles() -> None:
    pytest.importorskip("triton", reason="kernels need triton")
    interpret(__file__, "body_second_tiles", kinds=["plain", "norm", "residual"])


def test_choices_are_measured_kept_and_read_back(tmp_path: Path) -> None:
    problem, path = Problem(4096, 14336, 1), tmp_path / "linear.json"
    variants = candidates(problem, 90, 132)
    assert len({v.name for v in variants}) == len(variants) and variants[-1] == TORCH
    table = ChoiceTable("NVIDIA H200")
    assert table.variant(problem, 90, 132) == default_variant(problem, 90, 132)
    best = table.measure(problem, variants, lambda v: 1.0 if v == variants[2] else 2.0)
    assert best == variants[2]
    assert table.measure(Problem(4096, 14336, 2), variants, lambda v: 1.0) == variants[0], "ties: the first"
    table.save(path)
    assert ChoiceTable.load(path, "NVIDIA H200").variant(problem, 90, 132) == variants[2]
    assert ChoiceTable.load(path, "another GPU").chosen == {}
    assert ChoiceTable.load(tmp_path / "none.json", "NVIDIA H200").chosen == {}
    other = ChoiceTable("another GPU", {problem.key: variants[0].name})
    other.save(path)
    assert ChoiceTable.load(path, "another GPU") == other
    assert ChoiceTable.load(path, "NVIDIA H200").chosen == table.chosen, "a file may serve several GPUs"
    table.chosen[problem.key] = "gemv-of-an-older-version"
    assert table.variant(problem, 90, 132) == default_variant(problem, 90, 132)


def test_what_is_no_file_of_choices_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "linear.json"
    for text in ("[1]", "{", '{"a GPU": 3}', '{"a GPU": {"times_us": {}}}', '{"a GPU": {"chosen": []}}'):
        path.write_text(text)
        with pytest.raises(ValueError):
            ChoiceTable.load(path, "a GPU")
        with pytest.raises(ValueError):
            ChoiceTable("a GPU", {"a": "b"}).save(path)
        assert path.read_text() == text
    path.write_text('{"device": "a GPU", "chosen": {"a": "b"}, "times_us": {}}')  # of an earlier version
    assert ChoiceTable.load(path, "a GPU").chosen == {"a": "b"}
    assert ChoiceTable.load(path, "b").chosen == {}


def test_every_batch_has_candidates_and_large_ones_go_to_the_library() -> None:
    for info in (H200, RTX_PRO_6000):
        for n, k, gated in SHAPES.values():
            kinds = {
                rows: {v.kind for v in candidates(Problem(n, k, rows, gated), info.arch, info.num_sms)}
                for rows in (1, 2, 4, 8, 16, 32, 33)
            }
            assert kinds[1] == {"gemv", "gemm", "torch"}
            assert kinds[2] == kinds[8] == kinds[32] == {"gemm", "torch"} and kinds[33] == {"torch"}


SHAPES = {  # name -> (n, k, gated)
    "llama qkv": (6144, 4096, False),
    "llama o": (4096, 4096, False),
    "llama gate_up": (14336, 4096, True),
    "llama down": (4096, 14336, False),
    "llama lm_head": (128256, 4096, False),
    "eagle qkv": (6144, 8192, False),
    "eagle fc": (4096, 12288, False),
    "smol qkv": (960, 576, False),
    "smol o": (576, 576, False),
    "smol gate_up": (1536, 576, True),
    "smol down": (576, 1536, False),
    "smol lm_head": (49152, 576, False),
}


def _meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _use(name: str, rows: int) -> tuple[torch.Tensor, torch.Tensor, Fusion, torch.Tensor]:
    """A product as a layer uses it."""
    n, k, gated = SHAPES[name]
    weight, x, out = _meta(n * (2 if gated else 1), k), _meta(rows, k), _meta(rows, n)
    norm = InputNorm(_meta(k), 1e-5)
    if name.endswith("lm_head"):
        return x, weight, Fusion(norm=norm), _meta(rows, n, dtype=torch.float32)
    if name.endswith((" o", "down")):
        return x, weight, Fusion(residual=out), out
    if name.startswith("eagle"):
        return x, weight, Fusion(), out
    return x, weight, Fusion(norm=norm, gated=gated), out


def _first_two(name: str, rows: int, info: object) -> list[Variant]:
    n, k, gated = SHAPES[name]
    found = candidates(Problem(n, k, rows, gated), info.arch, info.num_sms)  # type: ignore[attr-defined]
    wanted = "gemv" if rows == 1 else "gemm"
    return [v for v in found if v.kind == wanted][:2]


@pytest.mark.parametrize("name", SHAPES)
def test_variants_fit(name: str) -> None:
    pytest.importorskip("triton", reason="kernels need triton")
    for info in (H200, RTX_PRO_6000):
        for rows in (1, 16):
            x, weight, fusion, out = _use(name, rows)
            for variant in _first_two(name, rows, info)[:1]:
                check(linear_launch(x, weight, fusion, out, variant, pdl=True), archs=(info.arch,))


def test_weights_are_requested_before_the_wait() -> None:
    pytest.importorskip("triton", reason="kernels need triton")
    for rows in (1, 8):
        x, weight, fusion, out = _use("llama qkv", rows)
        variant = _first_two("llama qkv", rows, H200)[0]
        ptx = compile_launch(linear_launch(x, weight, fusion, out, variant, pdl=True), 90).ptx
        before, after = ptx.split("griddepcontrol.wait", 1)
        # 16 bytes a load: a gemv's whole tile, a gemm's first one
        assert before.count("ld.global") >= 8 and "v4.b32" in before
        assert "ld.global" in after or "cp.async" in after

"""What of NVFP4's activations can be compared with NVIDIA's and FlashInfer's code on one GPU.

    python benchmark/h200/nvfp4.py                 # FlashInfer and tvm-ffi on the path; nvcc
    python benchmark/h200/nvfp4.py --fast-math     # quantising with FlashInfer's approximate reciprocals

recipe      sgl_kernel's reference against a kernel of NVIDIA's own conversions (nvfp4_recipe.cu), bit for
            bit; with --fast-math against the one with approximate reciprocals: how many codes differ
devices     the reference on the GPU against itself on the CPU, bit for bit
tiles       FlashInfer's block_scale_interleave against sgl_kernel's layout of scales, bit for bit
decoding    FlashInfer's e2m1_and_ufp8sf_scale_to_float of the reference's codes and tiled scales
quantise    FlashInfer's nvfp4_quantize against the reference. Its kernels have a body from SM100 on alone
            (quantization.cuh): before that they write nothing, which is what the line says then
refusal     before SM100: a server refuses --fp4-gemm-backend flashinfer_cutlass by name
trial       from SM100 on: what a server tries at its start, on random weights of real shapes
rows        from SM100 on: a row's result is the same bits alone and among 64, which the toggle would like
graph       from SM100 on: a replayed CUDA graph of both layers gives the same bits as the eager calls

A line each; the exit code is 1 if something differs that should not. Nothing is timed but the whole.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from sgl_kernel.flashinfer_package import find_flashinfer
from sgl_kernel.fp4.flashinfer import FlashInferFp4
from sgl_kernel.fp4.layout import in_tiles
from sgl_kernel.fp4.reference import Quantised, quantise
from sgl_kernel.fp4.trial import EXPERTS_LIMIT, LINEAR_LIMIT, experts_error, linear_error
from sgl_kernel.fp4.weights import Fp4Experts, Fp4Matrix, experts_for_products, matrix_for_products
from sgl_kernel.moe.weights import ExpertMatrix, Format
from sglang.srt.configs.executor_args import ExecutorArgs
from sglang.srt.configs.fp4_args import BOTH_IN_FP4
from sglang.srt.managers.executor_build_fp4 import check_fp4
from sglang.srt.managers.executor_build_models import ExecutorArgsError

HERE: Final = Path(__file__).resolve().parent
EXACT: Final = "FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH"
MOST_FAST: Final = 1e-3  # part of the codes that approximate reciprocals may change: ties, and next to them
SIZES: Final = ((1, 64), (33, 512), (128, 7168), (300, 2048))  # rows, columns
SCALES: Final = ((1, 4), (128, 32), (130, 7), (4096, 448))  # rows, scales of a row
LINEAR: Final = (5120, 2048)  # rows and columns: Qwen3-30B-A3B's q, k and v, and its experts
NUM_EXPERTS, INNER, TOP_K = 128, 768, 8
DEVICE: Final = torch.device("cuda")

Outcome = tuple[bool, str]


def inputs(seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """x [T, K] bfloat16 on the CPU, and a global scale: usual ones, and such that blocks are cut off."""
    g = torch.Generator().manual_seed(seed)
    cases = []
    for rows, columns in SIZES:
        for cut in (1.0, 8.0):
            x = torch.randn(rows, columns, generator=g).to(torch.bfloat16)
            x[0, :16] = 0
            cases.append((x, torch.tensor(6 * 448 / float(x.abs().max()) * cut)))
    return cases


def different(codes: torch.Tensor, scale: torch.Tensor, expected: Quantised) -> tuple[int, int]:
    """Codes (of two values each) and scales that are not the same bits."""
    scales = expected.scale.view(torch.uint8).cpu() != scale.cpu()
    return int((codes.cpu() != expected.codes.cpu()).sum()), int(scales.sum())


def judged(parts: list[tuple[int, int]], total: int, allowed: float) -> Outcome:
    codes, scales = (sum(part) for part in zip(*parts, strict=True))
    text = f"{codes} of {total} bytes of codes and {scales} scales differ"
    return codes <= allowed * total and scales <= allowed * total, text


def recipe(fast: bool) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "recipe.so"
        major, minor = torch.cuda.get_device_capability()
        arch = f"-arch=sm_{major}{minor}a"
        own = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "nvcc"
        nvcc = str(own) if own.exists() else "nvcc"
        command = [
            nvcc,
            "-shared",
            "-Xcompiler",
            "-fPIC",
            arch,
            "-o",
            str(library),
            str(HERE / "nvfp4_recipe.cu"),
        ]
        subprocess.run(command, check=True)
        loaded = ctypes.CDLL(str(library))
    parts, total = [], 0
    for x, by in inputs(0):
        wide = x.float().to(DEVICE)
        codes = torch.zeros(x.shape[0], x.shape[1] // 2, dtype=torch.uint8, device=DEVICE)
        scale = torch.zeros(x.shape[0], x.shape[1] // 16, dtype=torch.uint8, device=DEVICE)
        torch.cuda.synchronize()
        places = [ctypes.c_void_p(t.data_ptr()) for t in (wide, codes, scale)]
        error = loaded.quantise_on_device(
            places[0], ctypes.c_float(float(by)), places[1], places[2], scale.numel(), int(fast)
        )
        if error:
            return False, f"CUDA's error {error}"
        parts.append(different(codes, scale, quantise(x, by)))
        total += codes.numel()
    return judged(parts, total, MOST_FAST if fast else 0.0)


def devices() -> Outcome:
    parts, total = [], 0
    for x, by in inputs(1):
        own = quantise(x.to(DEVICE), by.to(DEVICE))
        parts.append(different(own.codes, own.scale.view(torch.uint8), quantise(x, by)))
        total += own.codes.numel()
    return judged(parts, total, 0.0)


def tiles(flashinfer: Any) -> Outcome:
    g = torch.Generator().manual_seed(2)
    wrong = []
    for rows, columns in SCALES:
        for shape in ((rows, columns), (3, rows, columns)):
            scale = torch.randint(0, 127, shape, generator=g).to(torch.uint8).to(DEVICE)
            got = flashinfer.block_scale_interleave(scale)
            if not torch.equal(got.view(torch.uint8).flatten(), in_tiles(scale).flatten()):
                wrong.append(shape)
    return not wrong, f"{2 * len(SCALES)} shapes, other bytes: {wrong or 'none'}"


def decoding(flashinfer: Any) -> Outcome:
    """By its host function."""
    wrong = []
    for x, by in inputs(3):
        quantised = quantise(x, by)
        whole = (1 / by).reshape(1)
        got = flashinfer.e2m1_and_ufp8sf_scale_to_float(
            quantised.codes, in_tiles(quantised.scale).flatten(), whole, 16, 1, True
        )
        expected = quantised.values().double() * whole.double()
        if not torch.allclose(got.double(), expected, rtol=2.0**-22, atol=0):
            wrong.append(tuple(x.shape))
    return not wrong, f"{len(inputs(3))} inputs, other values: {wrong or 'none'}"


def quantised_by(flashinfer: Any, fast: bool) -> Outcome:
    parts, total = [], 0
    for x, by in inputs(4):
        expected = quantise(x, by)
        codes, scale = flashinfer.nvfp4_quantize(
            x.to(DEVICE),
            by.reshape(1).to(DEVICE),
            sfLayout=flashinfer.SfLayout.layout_128x4,
            enable_pdl=False,
        )
        tiled = in_tiles(expected.scale)
        own = int((codes.cpu() != expected.codes).sum())
        parts.append((own, int((scale.view(torch.uint8).cpu().flatten() != tiled.flatten()).sum())))
        total += codes.numel()
    fine, text = judged(parts, total, MOST_FAST if fast else 0.0)
    if torch.cuda.get_device_capability() < (10, 0):
        return True, f"{text}: before SM100 its kernels have no body, so nothing can be compared here"
    return fine, text


def refusal() -> Outcome:
    try:
        check_fp4(ExecutorArgs("m", device="cuda", fp4_gemm_backend=BOTH_IN_FP4))
    except ExecutorArgsError as error:
        return True, str(error)
    return False, "it was taken"


def random_matrix(size: tuple[int, int, int], parts: int, device: torch.device) -> ExpertMatrix:
    """size: matrices, rows, columns; weights of about 1 / sqrt(columns), inputs up to 4."""
    num, rows, columns = size
    g = torch.Generator(device).manual_seed(rows + columns)
    shape = (num, rows, columns // 8)
    data = torch.randint(-(2**31), 2**31 - 1, shape, generator=g, device=device, dtype=torch.int32)
    scale = torch.rand(num, rows, columns // 16, generator=g, device=device) + 0.5
    whole = (torch.rand(num, parts, generator=g, device=device) + 0.5) / (3 * columns**0.5)
    given = torch.full_like(whole, 4 / (6 * 448))
    return ExpertMatrix(
        Format.NVFP4, data, scale.to(torch.float8_e4m3fn), whole, input_scale=given
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Layers:
    """A linear layer and one of experts, with inputs in 4 bits."""

    flashinfer: FlashInferFp4
    matrix: Fp4Matrix
    experts: Fp4Experts

    @classmethod
    def make(cls, flashinfer: FlashInferFp4, device: torch.device) -> Layers:
        matrix = matrix_for_products(random_matrix((1, *LINEAR), 1, device))
        gate_up, down = expert_matrices(device)
        experts = experts_for_products(gate_up, down)
        flashinfer.reserve(experts, TOP_K, torch.bfloat16)
        return cls(flashinfer, matrix, experts)

    def run(self, x: torch.Tensor) -> list[torch.Tensor]:
        """x: [T, H]; every token goes to experts of its own choice, which its numbers decide."""
        _, chosen = x[:, :NUM_EXPERTS].topk(TOP_K)
        weights = torch.full(chosen.shape, 1 / TOP_K, device=x.device)
        of_experts = self.flashinfer.experts(x, weights, chosen.int(), self.experts)
        return [self.flashinfer.linear(x, self.matrix), of_experts]


def expert_matrices(device: torch.device) -> tuple[ExpertMatrix, ExpertMatrix]:
    hidden = LINEAR[1]
    gate_up = random_matrix((NUM_EXPERTS, 2 * INNER, hidden), 2, device)
    return gate_up, random_matrix((NUM_EXPERTS, hidden, INNER), 1, device)


def trial(device: torch.device) -> Outcome:
    flashinfer = FlashInferFp4()
    linear = linear_error(flashinfer, random_matrix((1, *LINEAR), 1, device), torch.bfloat16)
    experts = experts_error(flashinfer, *expert_matrices(device), TOP_K, torch.bfloat16)
    text = f"off by {linear:.2g} (at most {LINEAR_LIMIT}) and, experts, {experts:.2g} ({EXPERTS_LIMIT})"
    return linear <= LINEAR_LIMIT and experts <= EXPERTS_LIMIT, text


def rows_alone(device: torch.device) -> Outcome:
    layers = Layers.make(FlashInferFp4(), device)
    x = torch.randn(64, LINEAR[1], generator=torch.Generator().manual_seed(5)).to(device, torch.bfloat16)
    together = layers.run(x)
    other = [0, 0]
    for row in range(len(x)):
        for i, alone in enumerate(layers.run(x[row : row + 1])):
            other[i] += int(not torch.equal(alone[0], together[i][row]))
    return True, f"rows with other bits alone: linear {other[0]}, experts {other[1]}, of {len(x)}"


def graph(device: torch.device) -> Outcome:
    layers = Layers.make(FlashInferFp4(), device)
    x = torch.randn(8, LINEAR[1], device=device).to(torch.bfloat16)
    expected = [out.clone() for out in layers.run(x)]
    captured = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    given = torch.zeros_like(x)
    with torch.cuda.stream(stream):
        layers.run(given)
        with torch.cuda.graph(captured, stream=stream):
            outs = layers.run(given)
        given.copy_(x)
        captured.replay()
    stream.synchronize()
    same = [torch.equal(out, right) for out, right in zip(outs, expected, strict=True)]
    return all(same), f"linear and experts the same: {same}"


def run(fast: bool) -> list[dict[str, Any]]:
    os.environ[EXACT] = "0" if fast else "1"  # read when its module first quantises
    flashinfer = find_flashinfer()
    checks: dict[str, Callable[[], Outcome]] = {
        "recipe": lambda: recipe(fast),
        "devices": devices,
        "tiles": lambda: tiles(flashinfer),
        "decoding": lambda: decoding(flashinfer),
        "quantise": lambda: quantised_by(flashinfer, fast),
    }
    if torch.cuda.get_device_capability() < (10, 0):
        checks["refusal"] = refusal
    else:
        later = {"trial": trial, "rows": rows_alone, "graph": graph}
        checks |= {name: partial(check, DEVICE) for name, check in later.items()}
    rows = []
    for name, check in checks.items():
        began = time.perf_counter()
        try:
            fine, text = check()
        except Exception as error:  # one check that can't be made is a line, not the end of the others
            fine, text = False, f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        seconds = round(time.perf_counter() - began, 1)
        rows.append({"check": name, "fine": fine, "what": text, "seconds": seconds})
        print(f"{name:9} {'ok' if fine else 'WRONG':5} {seconds:6.1f} s  {text}", flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fast-math", action="store_true", help="FlashInfer's approximate reciprocals")
    parser.add_argument("--out", type=Path, help="also write the lines as JSON, one each, to this file")
    args = parser.parse_args()
    major, minor = torch.cuda.get_device_capability()
    print(f"{torch.cuda.get_device_name()} (SM{major}{minor}), torch {torch.__version__}")
    rows = run(args.fast_math)
    if args.out is not None:
        args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return 0 if all(row["fine"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

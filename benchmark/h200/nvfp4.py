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
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from sgl_kernel.attention.prefill.flashinfer import find_flashinfer
from sgl_kernel.fp4.layout import in_tiles
from sgl_kernel.fp4.reference import Quantised, quantise

HERE: Final = Path(__file__).resolve().parent
EXACT: Final = "FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH"
MOST_FAST: Final = 1e-3  # part of the codes that approximate reciprocals may change: ties, and next to them
SIZES: Final = ((1, 64), (33, 512), (128, 7168), (300, 2048))  # rows, columns
SCALES: Final = ((1, 4), (128, 32), (130, 7), (4096, 448))  # rows, scales of a row
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
        nvcc = str(Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "nvcc")
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

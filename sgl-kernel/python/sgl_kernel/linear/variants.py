"""Ways to carry out a product of a few rows, and which one a shape takes.

What is fastest depends on the shape, the rows, the GPU and what runs beside it; so a server times the
variants at startup and keeps the choices in a file. Nothing here touches a device.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sgl_kernel.launch import next_power_of_2

MAX_GEMV_ROWS = 1  # with 4 rows it is 1.5 to 2 times slower than tensor cores
MAX_GEMM_ROWS = 32
MAX_GEMM_CANDIDATES = 4  # worth timing: each is compiled for up to 16 and for up to 32 rows
ROW_CLASSES = (1, 4, 16, 32)


def row_class(rows: int) -> int:
    """Rows up to which the same variants are fast: 1, 4, 16 or 32, and beyond them none of ours."""
    return next((most for most in ROW_CLASSES if rows <= most), rows)


@dataclass(frozen=True, slots=True)
class Variant:
    """``torch``: the library's product; ``gemv``: rows of weights in registers; ``gemm``: tensor cores."""

    kind: Literal["torch", "gemv", "gemm"]
    block_n: int = 0  # rows of weights a program
    block_k: int = 0  # gemm: columns a step
    split: int = 1  # gemm: programs that share the columns of one tile
    stages: int = 1  # gemm: steps in flight
    num_warps: int = 4
    prefetch: int = 0  # gemm: steps after the first that are asked for before the wait
    programs_per_sm: int = 0  # gemv: programs that go on from tile to tile; 0: one program a tile

    @property
    def name(self) -> str:
        if self.kind == "torch":
            return "torch"
        if self.kind == "gemv":
            loop = f"-x{self.programs_per_sm}" if self.programs_per_sm else ""
            return f"gemv-n{self.block_n}-w{self.num_warps}{loop}"
        shape = f"n{self.block_n}-k{self.block_k}-s{self.split}"
        return f"gemm-{shape}-p{self.stages}-w{self.num_warps}-f{self.prefetch}"


TORCH = Variant("torch")


@dataclass(frozen=True, slots=True)
class Problem:
    """A product's shape: [rows, k] x [n, k]^T, bytes of 16-bit weights."""

    n: int  # of the result
    k: int
    rows: int
    gated: bool = False  # the weights are gate and up, 2 * n rows of them

    @property
    def key(self) -> str:
        return f"{self.n}x{self.k}{'-gated' if self.gated else ''}-rows{row_class(self.rows)}"


def candidates(problem: Problem, arch: int, num_sms: int) -> list[Variant]:
    """The variants worth timing, in the order of how likely they are to win; TORCH is the last."""
    found: list[Variant] = []
    if problem.rows <= MAX_GEMV_ROWS:
        found += _gemvs(problem)
    if problem.rows <= MAX_GEMM_ROWS:
        found += _gemms(problem, arch, num_sms)
    return [*found, TORCH]


def default_variant(problem: Problem, arch: int, num_sms: int) -> Variant:
    """Without a measurement: the first candidate of the kind that an H200 was fastest with."""
    wanted = "gemv" if problem.rows == 1 else "gemm"
    return next((v for v in candidates(problem, arch, num_sms) if v.kind == wanted), TORCH)


def _gemvs(problem: Problem) -> list[Variant]:
    """A thread holds 128 weights (of gate and up together), 64 registers of them; or 64 and a second tile on
    its way, which takes 160 to 185 registers in all: a SM has room for 3 programs of 4 warps, 1 of 8.
    """
    width = next_power_of_2(problem.k) * (2 if problem.gated else 1)
    found = []
    for held, num_warps, programs in ((128, 4, 0), (64, 4, 3), (64, 8, 1), (128, 8, 0)):
        block_n = held * 32 * num_warps // width
        if 1 <= block_n <= 16 and problem.n % block_n == 0:
            found.append(Variant("gemv", block_n=block_n, num_warps=num_warps, programs_per_sm=programs))
    return found


def _gemms(problem: Problem, arch: int, num_sms: int) -> list[Variant]:
    """Wide matrices first in tall tiles of little depth, narrow ones in deep tiles whose depth is shared."""
    limit = 99 * 1024 if arch >= 120 or arch in (86, 89) else 160 * 1024
    tall, deep = [(128, 64, 4, 4), (64, 64, 6, 4)], [(64, 128, 4, 4), (64, 256, 3, 4)]
    wide = _programs(problem, 128) >= num_sms
    shapes = tall + deep if wide else [deep[0], tall[0], deep[1], tall[1]]
    found = []
    for block_n, block_k, stages, num_warps in [*shapes, (32, 128, 4, 2), (32, 64, 4, 2)]:
        # 128 registers a thread at most for the first tile that is held before the wait
        held = block_n * block_k * (2 if problem.gated else 1) // (num_warps * 32)
        if problem.k % block_k or held > 128 or _shared(problem, block_n, block_k, stages) > limit:
            continue
        split = _split(problem, block_n, block_k, num_sms)
        # Without sharing the depth, the deepest tile alone was ever faster on an H200.
        splits = sorted({1, split}, reverse=True) if block_k == 256 else [split]
        found += [Variant("gemm", block_n, block_k, s, stages, num_warps, 2) for s in splits]
    return found[:MAX_GEMM_CANDIDATES]


def _programs(problem: Problem, block_n: int) -> int:
    """Tiles of weights: gate and up count both, one program takes twice as many."""
    return -(-problem.n * (2 if problem.gated else 1) // block_n)


def _shared(problem: Problem, block_n: int, block_k: int, stages: int) -> int:
    """Bytes of the tiles in flight: weights and input."""
    padded_rows = 16 if problem.rows <= 16 else 32
    return stages * block_k * 2 * (block_n * (2 if problem.gated else 1) + padded_rows)


def _split(problem: Problem, block_n: int, block_k: int, num_sms: int) -> int:
    """As many programs as fill the device, as long as each has four steps."""
    programs, steps, split = _programs(problem, block_n), problem.k // block_k, 1
    while programs * split < num_sms and steps >= 8 * split and split < 8:
        split *= 2
    return split


@dataclass(slots=True)
class ChoiceTable:
    """The variant of every (shape, rows) of one device, kept in a small JSON file: a section a device."""

    device: str  # name of the section
    chosen: dict[str, str] = field(default_factory=dict)  # Problem.key -> Variant.name
    times_us: dict[str, dict[str, float]] = field(default_factory=dict)  # what was measured

    def variant(self, problem: Problem, arch: int, num_sms: int) -> Variant:
        """The choice, if there is one that this version still has; else the default."""
        name = self.chosen.get(problem.key)
        by_name = {v.name: v for v in candidates(problem, arch, num_sms)}
        return by_name[name] if name in by_name else default_variant(problem, arch, num_sms)

    def measure(
        self, problem: Problem, variants: Sequence[Variant], time_us: Callable[[Variant], float]
    ) -> Variant:
        """Time every variant and keep the fastest; of equal ones the first."""
        times = {v.name: time_us(v) for v in variants}
        best = min(variants, key=lambda v: times[v.name])
        self.chosen[problem.key] = best.name
        self.times_us[problem.key] = {name: round(t, 3) for name, t in times.items()}
        return best

    def save(self, path: Path) -> None:
        """Other devices' sections stay as they are."""
        content = {**_sections(path), self.device: {"chosen": self.chosen, "times_us": self.times_us}}
        # Whole or not at all: another server may read it at this moment, or write it.
        unnamed = path.with_name(f"{path.name}.{os.getpid()}")
        unnamed.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
        unnamed.replace(path)

    @staticmethod
    def load(path: Path, device: str) -> ChoiceTable:
        """The device's choices; none if there is no file, or no section of it.

        Raises:
            ValueError: the file holds something else.
        """
        own = _sections(path).get(device, {})
        return ChoiceTable(device, dict(own.get("chosen", {})), dict(own.get("times_us", {})))


def _sections(path: Path) -> dict[str, dict[str, Any]]:
    """By device; of an earlier version's file, which held one device's choices and its name, that one."""
    content = json.loads(path.read_text()) if path.exists() else {}
    if not isinstance(content, dict):
        raise ValueError("it is no JSON object")
    if isinstance(content.get("device"), str):
        content = {content.pop("device"): content}
    for device, section in content.items():
        if not isinstance(section, dict) or not isinstance(section.get("chosen"), dict):
            raise ValueError(f"{device!r} has no choices")
    return content

"""Products of half-precision weights on CUDA, each with what a layer does right before and after it.

Up to 32 rows are bound by reading the weights, and a kernel of ours does all in one launch where it is
the fastest; more rows are the library's, with a norm before and an activation behind as launches of
their own. Sums are float32 in both; a kernel of ours rounds once at its end, the library at every launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from sgl_kernel._dispatch import device_info
from sgl_kernel.activation.ops import silu_and_mul
from sgl_kernel.linear.ops import Fusion, InputNorm, problem_of, small_linear, split_counters
from sgl_kernel.linear.variants import MAX_GEMM_ROWS, TORCH, ChoiceTable, Problem, Variant
from sgl_kernel.norm.ops import rms_norm


@dataclass(frozen=True, slots=True)
class Use:
    """One product of a step, as it was asked for."""

    x: torch.Tensor
    weight: torch.Tensor
    fusion: Fusion
    float_output: bool


class KernelChoices:
    """Which variant serves a product of so many rows. One for a worker; filled before graphs are captured."""

    def __init__(self, table: ChoiceTable, device: torch.device, pdl_rows: int = MAX_GEMM_ROWS) -> None:
        self.table = table
        self.counters = split_counters(device)  # of all products: they are launched on one stream
        self.pdl_rows = pdl_rows  # up to so many rows launches overlap with the kernel ahead
        self._uses: dict[Problem, list[Use]] | None = None
        # (problem, name of the choice) -> what it is: finding it anew costs as much as a launch
        self._variants: dict[tuple[Problem, str | None], Variant] = {}

    def pdl(self, rows: int) -> bool:
        return rows <= self.pdl_rows

    @staticmethod
    def norms_apart(rows: int) -> bool:
        """Whether no product of so many rows makes the norm of its input on its way. Of fewer some do, which
        each rank finds out for itself, and here they must agree."""
        return rows > MAX_GEMM_ROWS

    def variant(self, use: Use) -> Variant:
        problem = problem_of(use.x, use.weight, use.fusion)
        if problem.rows > MAX_GEMM_ROWS:
            return TORCH
        if self._uses is not None:
            self._uses.setdefault(problem, []).append(use)
        key = problem, self.table.chosen.get(problem.key)
        if key not in self._variants:
            info = device_info(use.x.device)
            self._variants[key] = self.table.variant(problem, info.arch, info.num_sms)
        return self._variants[key]

    @contextmanager
    def recording(self) -> Iterator[dict[Problem, list[Use]]]:
        """The products asked for within it, small ones only, by their problem."""
        self._uses = {}
        try:
            yield self._uses
        finally:
            self._uses = None


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    fusion: Fusion,
    choices: KernelChoices,
    *,
    float_output: bool = False,
) -> torch.Tensor:
    """x: [T, K]; weight: [N, K], or [2 * N, K] gate and up with ``fusion.gated`` -> [T, N].

    ``fusion.residual`` is changed in place and returned.
    """
    use = Use(x, weight, fusion, float_output)
    return carry_out(use, choices.variant(use), choices)


def carry_out(use: Use, variant: Variant, choices: KernelChoices) -> torch.Tensor:
    """By this variant."""
    pdl = choices.pdl(use.x.shape[0])
    if variant == TORCH:
        return _by_library(use.x, use.weight, use.fusion, pdl, use.float_output)
    dtype = torch.float32 if use.float_output else None
    return small_linear(
        use.x, use.weight, use.fusion, out=use.fusion.residual, out_dtype=dtype, variant=variant,
        counters=choices.counters, pdl=pdl,
    )  # fmt: skip


def _by_library(
    x: torch.Tensor, weight: torch.Tensor, fusion: Fusion, pdl: bool, float_output: bool
) -> torch.Tensor:
    if fusion.norm is not None:
        x = rms_norm(x, fusion.norm.weight, fusion.norm.eps, pdl=pdl)
    if fusion.residual is not None:
        out = fusion.residual.addmm_(x, weight.t())
        return out if fusion.bias is None else out.add_(fusion.bias)
    if float_output:
        out = torch.mm(x, weight.t(), out_dtype=torch.float32)
        return out if fusion.bias is None else out + fusion.bias
    if fusion.bias is not None:
        return torch.addmm(fusion.bias, x, weight.t())
    out = torch.mm(x, weight.t())
    return silu_and_mul(out, pdl=pdl) if fusion.gated else out


__all__ = ["Fusion", "InputNorm", "KernelChoices", "Use", "carry_out", "product"]

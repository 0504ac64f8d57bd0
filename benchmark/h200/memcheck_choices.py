"""Choices of kernels without timing: for products of given widths, as many different kernels as there are."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count, product
from pathlib import Path

import torch

from sgl_kernel._dispatch import DeviceInfo, device_info
from sgl_kernel.linear.variants import ROW_CLASSES, TORCH, ChoiceTable, Problem, candidates


def write_choices(file: Path, widths: Iterable[int]) -> None:
    """For the current GPU."""
    device = torch.device("cuda", torch.cuda.current_device())
    name = torch.cuda.get_device_name(device)
    ChoiceTable(name, chosen_for(widths, device_info(device))).save(file)


def chosen_for(widths: Iterable[int], info: DeviceInfo) -> dict[str, str]:
    """For every product that could occur: more than do, so that a start finds nothing to time."""
    chosen = {}
    sides = sorted(widths)
    turns = {(rows, gated): count() for rows in ROW_CLASSES for gated in (False, True)}  # each in turn
    shapes = product(sides, sides, ROW_CLASSES, (False, True))
    for n, k, rows, gated in shapes:
        problem = Problem(n, k, rows, gated)
        own = [v for v in candidates(problem, info.arch, info.num_sms) if v != TORCH]
        chosen[problem.key] = own[next(turns[rows, gated]) % len(own)].name if own else TORCH.name
    return chosen

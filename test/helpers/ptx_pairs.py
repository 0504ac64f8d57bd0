"""Carries out the PTX of ``sgl_kernel.moe.unpacking.ptx``: no GPU is needed to know what it says."""

from __future__ import annotations

import re

import torch

MASK = 0xFFFFFFFF


def run_pairs(text: str, words: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """words: [2, n] int64 below 2 ** 32; scale: [2, n] bfloat16 -> [8, 2, n] bfloat16, results $0 … $7."""
    registers = {"$8": words[0], "$9": words[1], "$10": _join(scale)}
    for line in text.splitlines():
        if found := re.fullmatch(r"(\S+) ([^;]+);", line.strip()):
            operation, operands = found.group(1), found.group(2).split(", ")
            if not operation.startswith(".reg"):
                target, *sources = operands
                registers[target] = _result(operation, [_value(registers, s, words) for s in sources])
    return torch.stack([_halves(registers[f"${i}"]) for i in range(8)])


def _value(registers: dict[str, torch.Tensor], name: str, like: torch.Tensor) -> torch.Tensor:
    if name in registers:
        return registers[name]
    return torch.full_like(like[0], int(name, 0))


def _result(operation: str, sources: list[torch.Tensor]) -> torch.Tensor:
    if operation == "mov.b32":
        return sources[0]
    if operation == "and.b32":
        return sources[0] & sources[1]
    if operation == "shl.b32":
        return (sources[0] << sources[1]) & MASK
    if operation == "shr.b32":
        return sources[0] >> sources[1]
    if operation == "lop3.b32":
        a, b, c, table = (*sources[:3], int(sources[3][0]))
        return _lookup(a, b, c, table)
    if operation == "prmt.b32":
        return _permute(sources[0] | (sources[1] << 32), int(sources[2][0]))
    assert operation == "fma.rn.bf16x2", operation
    a, b, c = (_halves(source).double() for source in sources)
    return _join((a * b + c).bfloat16())  # products of bfloat16 and these sums are exact in float64


def _lookup(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, table: int) -> torch.Tensor:
    """Bit by bit: bit ``4 a + 2 b + c`` of the table."""
    out = torch.zeros_like(a)
    for index in range(8):
        if table >> index & 1:
            chosen = [x if index >> at & 1 else ~x & MASK for x, at in ((a, 2), (b, 1), (c, 0))]
            out |= chosen[0] & chosen[1] & chosen[2]
    return out


def _permute(both: torch.Tensor, selector: int) -> torch.Tensor:
    out = torch.zeros_like(both)
    for at in range(4):
        byte = selector >> (4 * at) & 7
        out |= ((both >> (8 * byte)) & 0xFF) << (8 * at)
    return out


def _halves(register: torch.Tensor) -> torch.Tensor:
    """[n] -> [2, n] bfloat16, the low half first."""
    both = torch.stack((register & 0xFFFF, register >> 16))
    return torch.where(both >= 0x8000, both - 0x10000, both).to(torch.int16).view(torch.bfloat16)


def _join(halves: torch.Tensor) -> torch.Tensor:
    """[2, n] bfloat16 -> [n] int64."""
    bits = halves.contiguous().view(torch.int16).to(torch.int64) & 0xFFFF
    return bits[0] | (bits[1] << 16)

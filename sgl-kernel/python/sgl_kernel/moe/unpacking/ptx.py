"""PTX that makes bfloat16 pairs of 4-bit codes, two weights an instruction.

Operands: $0 … $7 the results (nibble i of both words), $8 and $9 two words of a row, $10 their scales.
``prmt`` puts the low halves of both words into one register, and the high halves into another: nibbles of the
two words are then 16 bits apart, where a pair of bfloat16 has its elements.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

NUM_RESULTS: Final = 8
CONSTRAINTS: Final = ",".join(["=&r"] * NUM_RESULTS + ["r"] * 3)


def _program(registers: str, constants: dict[str, int], lines: Iterable[str]) -> str:
    head = [f".reg .b32 {registers}, {', '.join(constants)};"]
    head += [f"mov.b32 {name}, {value:#010x};" for name, value in constants.items()]
    head += ["prmt.b32 low, $8, $9, 0x5410;", "prmt.b32 high, $8, $9, 0x7632;"]
    return "\n".join(["{", *head, *lines, "}"])


def int4_program() -> str:
    """``(code - 8) * scale``: 0x4300 | code is 128 + code; less 136, exactly; times the scale, rounded."""
    lines = []
    for i in range(NUM_RESULTS):
        half = "low" if i < 4 else "high"
        if i % 4:
            lines.append(f"shr.b32 {half}, {half}, 4;")
        lines += [
            f"lop3.b32 code, {half}, 0x000f000f, magic, 0xea;",  # (half & mask) | magic
            "fma.rn.bf16x2 code, code, one, less;",
            f"fma.rn.bf16x2 ${i}, code, $10, none;",
        ]
    constants = {"magic": 0x43004300, "one": 0x3F803F80, "less": 0xC308C308, "none": 0x80008000}
    return _program("low, high, code", constants, lines)


def nvfp4_program() -> str:
    """``e2m1(code) * scale / 2 ** 8``: its exponent and mantissa are a bfloat16's that is 2 ** 126 times too
    small; the scale given is 2 ** 118 times its own (2 ** 126 would overflow). MXFP4's, which is no larger
    than 2, is given 2 ** 126 times its own, and nothing is too small."""
    lines = []
    for i in range(NUM_RESULTS):
        half, at = "low" if i < 4 else "high", 4 * (i % 4)  # of the code in its 16 bits
        lines += [
            f"{'shl' if at < 6 else 'shr'}.b32 code, {half}, {abs(6 - at)};",
            f"shl.b32 sign, {half}, {12 - at};",
            "and.b32 sign, sign, none;",
            "lop3.b32 code, code, 0x01c001c0, sign, 0xea;",  # (code & mask) | sign
            f"fma.rn.bf16x2 ${i}, code, $10, none;",
        ]
    constants = {"none": 0x80008000}  # -0, which adds nothing
    return _program("low, high, code, sign", constants, lines)

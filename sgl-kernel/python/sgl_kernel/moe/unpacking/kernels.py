"""Words of eight 4-bit codes to weights, in registers: what a product of tensor cores takes.

Nibble i of words j, j + 1, … are columns 8 j + i, 8 (j + 1) + i, …: a tile of words is eight tiles of
weights, each in the very layout of the words, so nothing moves between threads. The other factor's columns
are put in that order beforehand (``routing.kernels``), which is cheap: there are few tokens.
"""

import os

import triton
import triton.language as tl

from sgl_kernel.moe.unpacking.ptx import CONSTRAINTS, int4_program, nvfp4_program

INT4 = tl.constexpr(1)
NVFP4 = tl.constexpr(2)
FP8 = tl.constexpr(3)  # no words: nothing to unpack
MXFP4 = tl.constexpr(4)


@triton.jit
def _weights(words, scale, i: tl.constexpr, FORMAT: tl.constexpr, CT: tl.constexpr):
    """Nibble i of each word, times the scale, in CT; by float32, one rounding."""
    if FORMAT == MXFP4:
        scale = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    codes = (words >> (4 * i)) & 15
    if FORMAT == INT4:
        # 2 ** 23 + code, less 2 ** 23 + 8: exact, and no conversion of integers
        value = (codes | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0
    else:
        # Exponent and mantissa of e2m1 are those of a float16 that is 2 ** 14 times too small.
        half = ((codes & 7) << 9) | ((codes & 8) << 12)
        value = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    return (value * scale.to(tl.float32)).to(CT)


@triton.jit
def _unpack(words, scale, FORMAT: tl.constexpr, CT: tl.constexpr):
    return (
        _weights(words, scale, 0, FORMAT, CT), _weights(words, scale, 1, FORMAT, CT),
        _weights(words, scale, 2, FORMAT, CT), _weights(words, scale, 3, FORMAT, CT),
        _weights(words, scale, 4, FORMAT, CT), _weights(words, scale, 5, FORMAT, CT),
        _weights(words, scale, 6, FORMAT, CT), _weights(words, scale, 7, FORMAT, CT),
    )  # fmt: skip


if os.environ.get("TRITON_INTERPRET") == "1":

    @triton.jit
    def unpack(words, scale, FORMAT: tl.constexpr, CT: tl.constexpr, PAIRS: tl.constexpr):
        """The interpreter cannot run PTX."""
        return _unpack(words, scale, FORMAT, CT)

else:
    _INT4_PTX = tl.constexpr(int4_program())
    _NVFP4_PTX = tl.constexpr(nvfp4_program())
    _CONSTRAINTS = tl.constexpr(CONSTRAINTS)
    _LARGE = tl.constexpr(2.0**118)  # what NVFP4's program wants scales to be multiplied by

    @triton.jit
    def unpack(words, scale, FORMAT: tl.constexpr, CT: tl.constexpr, PAIRS: tl.constexpr):
        """Eight tiles of weights [N, W] of words [N, W] and their scales [N, W].

        PAIRS: to bfloat16 by PTX, two weights an instruction (``ptx.py``); the same numbers, but those of
        NVFP4 are 2 ** 8 times too small.
        """
        if PAIRS:
            if FORMAT == MXFP4:  # 2 ** 126 times the scale, in its exponent: nothing is left to correct
                factor = ((scale.to(tl.int16) + 126) << 7).to(tl.bfloat16, bitcast=True)
            else:
                factor = (scale.to(tl.float32) * (1.0 if FORMAT == INT4 else _LARGE)).to(tl.bfloat16)
            program: tl.constexpr = _INT4_PTX if FORMAT == INT4 else _NVFP4_PTX
            return tl.inline_asm_elementwise(
                program,
                _CONSTRAINTS,
                [words, factor],
                dtype=(
                    tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
                    tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
                ),
                is_pure=True,
                pack=2,
            )  # fmt: skip
        else:
            return _unpack(words, scale, FORMAT, CT)

"""Masks of grammars in Triton, for the rows that have one."""

import triton
import triton.language as tl

from sgl_kernel.common.kernels import begin_dependent
from sgl_kernel.sampling.kernels import LARGEST, is_finite, node_number


@triton.jit
def apply_masks_kernel(
    logits,  # [R * NODES, VOCAB] or [T, VOCAB] float32, changed in place
    which,  # [R] int32 the row's place in ``masks``; below 0: it has none
    masks,  # [G, NODES, WORDS] int32
    lines,  # [T] int64 numbers of nodes if LINES; else there is a line for each
    logits_stride,
    VOCAB,
    WORDS,
    NODES: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    line = tl.program_id(1).to(tl.int64)
    number = node_number(lines, line, LINES)
    row, node = number // NODES, number % NODES
    place = tl.load(which + row).to(tl.int64)
    if place >= 0:
        words = masks + (place * NODES + node) * WORDS
        for first in range(tl.program_id(0) * BLOCK, VOCAB, tl.num_programs(0) * BLOCK):
            column = first + tl.arange(0, BLOCK)
            inside = column < VOCAB
            word = tl.load(words + column // 32, mask=inside, other=0)
            forbidden = ((word >> (column % 32)) & 1) == 0
            target = logits + line * logits_stride + column
            raw = tl.load(target, mask=inside, other=0.0)
            # Stays finite: what is not finite means, further down, that the logits came so.
            tl.store(target, -LARGEST, mask=inside & forbidden & is_finite(raw))

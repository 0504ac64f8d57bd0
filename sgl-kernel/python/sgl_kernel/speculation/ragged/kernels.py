"""Where the nodes of rows of different lengths lie among a step's tokens."""

import triton
import triton.language as tl

from sgl_kernel.common.kernels import begin_dependent


@triton.jit(do_not_specialize=["num_rows"])
def lay_out_kernel(
    tokens,  # [R, NODES] int64
    root,  # [R] int64
    query_lens,  # [R] int64, 1 … NODES
    query_start,  # [R + 1] int64, written
    lines,  # [T] int64, written
    ids,  # [T] int64, written
    positions,  # [T] int64, written
    token_of,  # [R, NODES] int64, written
    num_rows,
    NODES: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program r writes what row r needs."""
    begin_dependent(PDL)
    own = tl.program_id(0)
    row = tl.arange(0, ROWS)
    lens = tl.load(query_lens + row, mask=row < num_rows, other=0)
    start = tl.sum(tl.where(row < own, lens, 0), 0)
    length = tl.sum(tl.where(row == own, lens, 0), 0)
    tl.store(query_start + own, start)
    tl.store(query_start + own + 1, start + length)  # as the next row's program does
    node = tl.arange(0, PADDED)
    inside = node < NODES
    asked = inside & (node < length)
    number = own * NODES + node
    tl.store(lines + start + node, number.to(tl.int64), mask=asked)
    tl.store(ids + start + node, tl.load(tokens + number, mask=asked, other=0), mask=asked)
    tl.store(positions + start + node, tl.load(root + own) + node, mask=asked)
    tl.store(token_of + number, start + tl.minimum(node, length - 1), mask=inside)

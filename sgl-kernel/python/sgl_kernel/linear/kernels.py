"""Products of one to 32 rows with a weight matrix, bound by reading the weights once.

Both kernels ask for weights before they wait for the kernel ahead: no kernel of a step writes weights.
What a norm would do between two products is done on the way in, what follows (an activation, the residual
sum) on the way out, so that a layer of a small batch is few launches.
"""

import triton
import triton.language as tl

from sgl_kernel.common.kernels import arrive, begin_dependent


@triton.jit
def _silu_mul(gate, up):
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _input_row(x, at, inside, norm, eps, K: tl.constexpr, NORM: tl.constexpr):
    """The row in float32, and what the sums are to be multiplied by at the end.

    A norm's factor is taken out of the sums: the products need not wait for it.
    """
    DT: tl.constexpr = x.dtype.element_ty
    v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    factor = 1.0
    if NORM:
        factor = tl.rsqrt(tl.sum(v * v, 0) / K + eps)
        v = (v * norm).to(DT).to(tl.float32)
    return v, factor


@triton.jit
def _finish(
    acc, row, column, inside, bias, residual, out, residual_stride, out_stride,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """acc: float32; row and column broadcast to its shape. ``out`` may be the residual itself."""
    if BIAS:
        acc += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        acc += tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + column, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rows_of_weights(w, column, at, N, K: tl.constexpr, K_PAD: tl.constexpr, EVEN: tl.constexpr):
    """[BLOCK_N, K_PAD]"""
    tile = w + column.to(tl.int64)[:, None] * K + at[None, :]
    if (K_PAD == K) & EVEN:
        return tl.load(tile)
    there = (at < K)[None, :]
    if EVEN == 0:
        there = there & (column < N)[:, None]
    return tl.load(tile, mask=there, other=0.0)


@triton.jit
def _put_tile(
    gate, up, v, factor, column, N, bias, residual, out,
    GATED: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """The products of rows of weights ``column`` with v, finished."""
    acc = tl.sum(gate.to(tl.float32) * v[None, :], 1) * factor
    if GATED:
        acc = _silu_mul(acc, tl.sum(up.to(tl.float32) * v[None, :], 1) * factor)
    _finish(acc, 0, column, column < N, bias, residual, out, 0, 0, BIAS, RESIDUAL)


@triton.jit
def gemv_kernel(
    x,  # [1, K]
    w,  # [N, K], or [2 * N, K] gate and up if GATED
    norm,  # [K] if NORM
    bias,  # [N] if BIAS
    residual,  # [1, N] if RESIDUAL
    out,  # [1, N]
    N,
    eps,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVEN: tl.constexpr,  # N is a multiple of BLOCK_N
    LOOP: tl.constexpr,  # a program takes tiles until there are none; else it takes one
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program holds BLOCK_N rows of weights in registers, whole; with LOOP the next ones are on their way.

    The row is loaded and normed once a program, so few programs with many tiles read it less often.
    """
    tile, tiles = tl.program_id(0), tl.cdiv(N, BLOCK_N)
    rows = tl.arange(0, BLOCK_N)
    at = tl.arange(0, K_PAD)
    inside = at < K
    ups = w + N.to(tl.int64) * K
    gate = _rows_of_weights(w, tile * BLOCK_N + rows, at, N, K, K_PAD, EVEN)
    up = gate
    if GATED:
        up = _rows_of_weights(ups, tile * BLOCK_N + rows, at, N, K, K_PAD, EVEN)
    scale = tl.zeros([K_PAD], tl.float32)
    if NORM:
        scale = tl.load(norm + at, mask=inside, other=0.0).to(tl.float32)
    begin_dependent(PDL)
    v, factor = _input_row(x, at, inside, scale, eps, K, NORM)
    if LOOP:
        following = tile + tl.num_programs(0)
        while following < tiles:
            next_gate = _rows_of_weights(w, following * BLOCK_N + rows, at, N, K, K_PAD, EVEN)
            next_up = next_gate
            if GATED:
                next_up = _rows_of_weights(ups, following * BLOCK_N + rows, at, N, K, K_PAD, EVEN)
            _put_tile(
                gate, up, v, factor, tile * BLOCK_N + rows, N, bias, residual, out, GATED, BIAS, RESIDUAL
            )
            gate, up, tile = next_gate, next_up, following
            following += tl.num_programs(0)
    _put_tile(gate, up, v, factor, tile * BLOCK_N + rows, N, bias, residual, out, GATED, BIAS, RESIDUAL)


@triton.jit
def _ask_ahead(of_row, begin, K: tl.constexpr, LINES: tl.constexpr):
    """Ask the L2 for the lines (of 128 bytes: 64 weights) of every row from ``begin`` on."""
    at = tl.minimum(begin + tl.arange(0, LINES) * 64, K - 1)
    pointers = of_row + at[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1];\n mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64, bitcast=True)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _merge_splits(
    part, part_squares, counters, acc, acc_up, squares, row, column, inside, rows_inside, M, N,
    SPLIT: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Store what this split found; whoever comes last of a tile's splits has the sums of all.

    They are added in the order of the splits, whoever does it: the same bits at every run.
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    WIDTH = N * 2 if GATED else N
    target = part + (split * M + row)[:, None] * WIDTH + column[None, :]
    tl.store(target, acc, mask=inside)
    if GATED:
        tl.store(target + N, acc_up, mask=inside)
    of_tile = part_squares + tile * SPLIT * M + row
    if NORM:
        tl.store(of_tile + split * M, squares, mask=rows_inside)
    last = arrive(counters + tile, SPLIT)
    if last:
        acc, acc_up, squares = tl.zeros_like(acc), tl.zeros_like(acc), tl.zeros_like(squares)
        for other in tl.static_range(SPLIT):
            source = part + (other * M + row)[:, None] * WIDTH + column[None, :]
            acc += tl.load(source, mask=inside, other=0.0, cache_modifier=".cg")
            if GATED:
                acc_up += tl.load(source + N, mask=inside, other=0.0, cache_modifier=".cg")
            if NORM:
                squares += tl.load(of_tile + other * M, mask=rows_inside, other=0.0, cache_modifier=".cg")
    return acc, acc_up, squares, last


@triton.jit
def _input_tile(x, norm, k, at_row, rows_inside, x_stride, at, K: tl.constexpr, NORM: tl.constexpr):
    """[BLOCK_M, BLOCK_K] of the input and its squares' sums. A norm's scale of the row comes at the end."""
    DT: tl.constexpr = x.dtype.element_ty
    here = x + at_row[:, None] * x_stride + (k + at)[None, :]
    v = tl.load(here, mask=rows_inside[:, None], other=0.0)
    squares = tl.zeros([at_row.shape[0]], tl.float32)
    if NORM:
        wide = v.to(tl.float32)
        squares = tl.sum(wide * wide, 1)
        v = (wide * tl.load(norm + k + at).to(tl.float32)[None, :]).to(DT)
    return v, squares


@triton.jit
def _multiply(acc, weights, v, CT: tl.constexpr):
    """[BLOCK_N, BLOCK_M] += weights [BLOCK_N, BLOCK_K] @ v [BLOCK_M, BLOCK_K]^T.

    Weights come first: tensor cores take 16 (Hopper: 64) rows of the first factor and 8 of the second,
    and rows of weights there are plenty.
    """
    return tl.dot(weights.to(CT), tl.trans(v.to(CT)), acc, input_precision="ieee")


@triton.jit
def _finish_tile(
    acc, acc_up, squares, row, column, inside, eps, bias, residual, out, residual_stride, out_stride,
    K: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """A norm's factor, the activation, and what ``_finish`` adds; acc: [BLOCK_M, BLOCK_N]."""
    if NORM:
        scale = tl.rsqrt(squares / K + eps)[:, None]
        acc, acc_up = acc * scale, acc_up * scale
    if GATED:
        acc = _silu_mul(acc, acc_up)
    _finish(
        acc, row[:, None], column[None, :], inside, bias, residual, out, residual_stride, out_stride,
        BIAS, RESIDUAL,
    )  # fmt: skip


@triton.jit(do_not_specialize=["M"])  # one compilation serves every number of rows
def small_gemm_kernel(
    x,  # [M, K]
    w,  # [N, K], or [2 * N, K] gate and up if GATED
    norm,  # [K] if NORM
    bias,  # [N] if BIAS
    residual,  # [M, N] if RESIDUAL
    out,  # [M, N]
    part,  # [SPLIT, M, N or 2 * N] float32 if SPLIT > 1
    part_squares,  # [tiles, SPLIT, M] float32 if SPLIT > 1 and NORM
    counters,  # [tiles] int32 if SPLIT > 1: zeros, and zeros again afterwards
    x_stride,
    residual_stride,
    out_stride,
    M,
    N,
    eps,
    K: tl.constexpr,
    CHUNK: tl.constexpr,  # columns of K that a split takes, a multiple of BLOCK_K
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,  # tiles after the first that the L2 is asked for before the wait
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    CT: tl.constexpr,
    PDL: tl.constexpr,
):
    split = tl.program_id(1)
    row = tl.arange(0, BLOCK_M)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = tl.arange(0, BLOCK_K)
    # Columns past N read a row of weights that is there, and are not stored.
    of_row = w + tl.minimum(column, N - 1).to(tl.int64)[:, None] * K
    tile = of_row + at[None, :]
    up_offset = N.to(tl.int64) * K
    begin, end = split * CHUNK, tl.minimum(split * CHUNK + CHUNK, K)
    first = tl.load(tile + begin)
    if GATED:
        first_up = tl.load(tile + up_offset + begin)
    if PREFETCH > 0:
        _ask_ahead(of_row, begin + BLOCK_K, K, PREFETCH * BLOCK_K // 64)
        if GATED:
            _ask_ahead(of_row + up_offset, begin + BLOCK_K, K, PREFETCH * BLOCK_K // 64)
    begin_dependent(PDL)
    rows_inside = row < M
    v, squares = _input_tile(x, norm, begin, row, rows_inside, x_stride, at, K, NORM)
    acc = _multiply(tl.zeros([BLOCK_N, BLOCK_M], tl.float32), first, v, CT)
    acc_up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if GATED:
        acc_up = _multiply(acc_up, first_up, v, CT)
    for k in tl.range(begin + BLOCK_K, end, BLOCK_K, num_stages=STAGES):
        v, more = _input_tile(x, norm, k, row, rows_inside, x_stride, at, K, NORM)
        acc = _multiply(acc, tl.load(tile + k), v, CT)
        if GATED:
            acc_up = _multiply(acc_up, tl.load(tile + up_offset + k), v, CT)
        if NORM:
            squares += more
    inside = (column < N)[None, :] & rows_inside[:, None]
    acc, acc_up = tl.trans(acc), tl.trans(acc_up)
    complete = True
    if SPLIT > 1:
        acc, acc_up, squares, complete = _merge_splits(
            part, part_squares, counters, acc, acc_up, squares, row, column, inside, rows_inside, M, N,
            SPLIT, NORM, GATED,
        )  # fmt: skip
    if complete:
        _finish_tile(
            acc, acc_up, squares, row, column, inside, eps, bias, residual, out, residual_stride, out_stride,
            K, NORM, GATED, BIAS, RESIDUAL,
        )  # fmt: skip

"""Products of few tokens: a program for a pair of token and expert, without finding out who shares one.

What two tokens both go to is read twice, the second time from the L2. In return nothing comes before the
products, and the weighted sum belongs to the second one: two launches a layer instead of four.

The tensor cores' narrowest tile has eight columns, and there is one row of x. For packed words they are the
eight columns of x that a word meets, where they are: nibble i of all words is multiplied with a tile that is
zero but for its column i, and the columns of the sum are added up at the end.
"""

import triton
import triton.language as tl

from sgl_kernel.common.kernels import arrive, begin_dependent, begin_in_order
from sgl_kernel.moe.products.kernels import by_word, finished, merge_splits, sums, tile_of, unpacked
from sgl_kernel.moe.unpacking.kernels import FP8, NVFP4, unpack

# Columns of a tile, and weights a word.
TILE = tl.constexpr(8)


@triton.jit
def _x_tile(x_row, k, K: tl.constexpr, WORDS: tl.constexpr, EVEN: tl.constexpr, CT: tl.constexpr):
    """[WORDS, 8]: columns k … k + 8 * WORDS - 1, zeros past the last one."""
    column = k + 8 * tl.arange(0, WORDS)[:, None] + tl.arange(0, TILE)[None, :]
    if EVEN:
        return tl.load(x_row + column).to(CT)
    return tl.load(x_row + column, mask=column < K, other=0.0).to(CT)


@triton.jit
def _dots(acc, tiles, v):
    """acc: [BN, 8]; tiles: eight of [BN, WORDS]; v: [WORDS, 8]"""
    eighth = tl.arange(0, TILE)[None, :]
    for i in tl.static_range(8):
        acc = tl.dot(tiles[i], tl.where(eighth == i, v, 0.0).to(v.dtype), acc, input_precision="ieee")
    return acc


@triton.jit
def _packed_sums(
    x_row, gate, ups, gate_scale, up_scale, begin, end,
    K: tl.constexpr, FORMAT: tl.constexpr, WORDS: tl.constexpr, GATED: tl.constexpr, STAGES: tl.constexpr,
    CT: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Columns begin … end - 1: [BN, 8] of gate and of up, to be added up."""
    EVEN: tl.constexpr = K % (8 * WORDS) == 0
    BN: tl.constexpr = gate.shape[0]
    acc, acc_up = tl.zeros([BN, TILE], tl.float32), tl.zeros([BN, TILE], tl.float32)
    for k in tl.range(begin, end, 8 * WORDS, num_stages=STAGES):
        v = _x_tile(x_row, k, K, WORDS, EVEN, CT)
        acc = _dots(acc, unpacked(gate, gate_scale, k, K, FORMAT, WORDS, EVEN, CT, PAIRS), v)
        if GATED:
            acc_up = _dots(acc_up, unpacked(ups, up_scale, k, K, FORMAT, WORDS, EVEN, CT, PAIRS), v)
    return acc, acc_up


@triton.jit
def _sums_of_row(
    x_row, w, scale, expert, n, begin, end,
    N: tl.constexpr, K: tl.constexpr, FORMAT: tl.constexpr, SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr, GATED: tl.constexpr, WORDS: tl.constexpr, STAGES: tl.constexpr,
    PAIRS: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """n: [BN] rows of the expert's matrix -> [BN] of gate and of up, over columns begin … end - 1."""
    row = expert * (2 * N if GATED else N) + n
    if FORMAT == 0 or FORMAT == FP8:
        m = tl.arange(0, TILE)[:, None]
        acc, acc_up = sums(
            x_row + 0 * m, w, scale, expert, row, n, m == 0, begin, end, N, K, FORMAT, SCALE_ROWS,
            SCALE_COLUMNS, GATED, WORDS, STAGES, PAIRS, CT,
        )  # fmt: skip
    else:
        GROUPS: tl.constexpr = K // (16 if FORMAT == NVFP4 else 32)
        gate = w + row[:, None] * (K // 8)
        gate_scale = scale + row[:, None] * GROUPS
        acc, acc_up = _packed_sums(
            x_row, gate, gate + N * (K // 8), gate_scale, gate_scale + N * GROUPS, begin, end, K, FORMAT,
            WORDS, GATED, STAGES, CT, PAIRS,
        )  # fmt: skip
    return tl.sum(acc, 1), tl.sum(acc_up, 1)


@triton.jit(do_not_specialize=["num_pairs"])
def pair_gate_up_kernel(
    x,  # [T, K], columns where they are
    w,  # [E, 2 * N, K] or [E, 2 * N, K / 8]: the gate's rows first
    scale,  # [E, rows, groups]
    global_scale,  # [E, PARTS]
    bias,  # [E, 2 * N] if BIAS
    experts,  # [T, TOP_K], negative: none
    out,  # [pairs, N]
    part,  # [SPLIT, pairs, 2 * N] float32 if SPLIT > 1
    counters,  # [pairs, tiles] int32 if SPLIT > 1: zeros, and zeros again afterwards
    num_pairs,
    x_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    FORMAT: tl.constexpr,
    PARTS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    BIAS: tl.constexpr,
    CLAMPED: tl.constexpr,
    BN: tl.constexpr,
    WORDS: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    PAIRS: tl.constexpr,
    CT: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_in_order(PDL)
    pair = tl.program_id(1)
    expert = tl.load(experts + pair).to(tl.int64)
    if expert < 0:
        return
    x_row = x + (pair // TOP_K).to(tl.int64) * x_stride
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    begin = tl.program_id(2) * CHUNK
    end = tl.minimum(begin + CHUNK, K)
    # Rows past the last one read one that is there, and are not stored.
    acc, acc_up = _sums_of_row(
        x_row, w, scale, expert, tl.minimum(n, N - 1), begin, end, N, K, FORMAT, SCALE_ROWS, SCALE_COLUMNS,
        True, WORDS, STAGES, PAIRS, CT,
    )  # fmt: skip
    complete = True
    if SPLIT > 1:
        counter = counters + pair * tl.num_programs(0) + tl.program_id(0)
        acc, acc_up, complete = merge_splits(
            part, counter, acc[:, None], acc_up[:, None], pair + tl.arange(0, 1), n, (n < N)[:, None],
            num_pairs, N, SPLIT, True,
        )  # fmt: skip
        acc, acc_up = acc.reshape([BN]), acc_up.reshape([BN])
    if complete:
        acc = finished(
            acc, acc_up, global_scale, bias, expert, tl.minimum(n, N - 1), N, PARTS, BIAS, True, CLAMPED,
            PAIRS,
        )  # fmt: skip
        tl.store(out + pair.to(tl.int64) * N + n, acc.to(out.dtype.element_ty), mask=n < N)


@triton.jit
def _down_ahead(
    x_row, w, scale, row,
    K: tl.constexpr, FORMAT: tl.constexpr, WORDS: tl.constexpr, PAIRS: tl.constexpr, CT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """[BN]. One pass takes all columns: the weights are on their way before the kernel ahead is done."""
    PER: tl.constexpr = 2 if FORMAT == NVFP4 else 4
    EVEN: tl.constexpr = K == 8 * WORDS
    GROUPS: tl.constexpr = K // (8 * PER)
    packed = tile_of(w + row[:, None] * (K // 8), tl.arange(0, WORDS), K // 8, EVEN)
    groups = tile_of(scale + row[:, None] * GROUPS, tl.arange(0, WORDS // PER), GROUPS, EVEN)
    begin_dependent(PDL)
    tiles = unpack(packed, by_word(groups, PER), FORMAT, CT, PAIRS)
    acc = tl.zeros([row.shape[0], TILE], tl.float32)
    return tl.sum(_dots(acc, tiles, _x_tile(x_row, 0, K, WORDS, EVEN, CT)), 1)


@triton.jit
def pair_down_kernel(
    x,  # [pairs, K]
    w,  # [E, N, K] or [E, N, K / 8]
    scale,  # [E, rows, groups]
    global_scale,  # [E, 1] if PARTS
    bias,  # [E, N] if BIAS
    experts,  # [T, TOP_K], negative: none
    weights,  # [T, TOP_K] float32
    base,  # [T, N] if BASE
    products,  # [pairs, N] float32: scratch
    counters,  # [T, tiles] int32: zeros, and zeros again afterwards
    out,  # [T, N]
    base_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    FORMAT: tl.constexpr,
    PARTS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    BIAS: tl.constexpr,
    BASE: tl.constexpr,
    AHEAD: tl.constexpr,  # one pass of packed words takes all columns
    BN: tl.constexpr,
    WORDS: tl.constexpr,
    STAGES: tl.constexpr,
    PAIRS: tl.constexpr,
    CT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Whoever comes last of a token's pairs adds them up, in the order of its list."""
    pair = tl.program_id(1)
    # ``experts`` was made before the kernel ahead, which began in order: it may be read before its end.
    expert = tl.load(experts + pair).to(tl.int64)
    is_used = expert >= 0
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    there = tl.minimum(n, N - 1)
    x_row = x + pair.to(tl.int64) * K
    if not AHEAD:
        begin_dependent(PDL)
    if is_used:
        if AHEAD:
            acc = _down_ahead(x_row, w, scale, expert * N + there, K, FORMAT, WORDS, PAIRS, CT, PDL)
        else:
            acc, _ = _sums_of_row(
                x_row, w, scale, expert, there, 0, K, N, K, FORMAT, SCALE_ROWS, SCALE_COLUMNS, False, WORDS,
                STAGES, PAIRS, CT,
            )  # fmt: skip
        acc = finished(acc, acc, global_scale, bias, expert, there, N, PARTS, BIAS, False, False, PAIRS)
        tl.store(products + pair.to(tl.int64) * N + n, acc, mask=n < N)
    elif AHEAD:
        begin_dependent(PDL)
    token = pair // TOP_K
    last = arrive(counters + token * tl.num_programs(0) + tl.program_id(0), TOP_K)
    if last:
        total = tl.zeros([BN], tl.float32)
        for slot in tl.static_range(TOP_K):
            own = token * TOP_K + slot
            used = tl.load(experts + own) >= 0
            source = products + own.to(tl.int64) * N + n
            product = tl.load(source, mask=(n < N) & used, other=0.0, cache_modifier=".cg")
            total += tl.where(used, tl.load(weights + own).to(tl.float32), 0.0) * product
        if BASE:
            total += tl.load(base + token.to(tl.int64) * base_stride + n, mask=n < N, other=0.0).to(
                tl.float32
            )
        tl.store(out + token.to(tl.int64) * N + n, total.to(out.dtype.element_ty), mask=n < N)

"""Products of the tokens of one expert with its matrix: gate and up with their activation, and down.

A program takes a block of pairs (at most BM tokens of one expert) and BN rows of the matrix (of gate and of
up if GATED), and goes through the columns; of packed words WORDS a pass. So a word is read once for a block.
float8 is multiplied as it is, and a scale goes to the sums of its block of columns: less work than scaling
the weights, and one rounding less.
"""

import triton
import triton.language as tl

from sgl_kernel.common.kernels import arrive, begin_dependent
from sgl_kernel.moe.routing.kernels import BLOCK_FIELDS
from sgl_kernel.moe.unpacking.kernels import FP8, NVFP4, unpack


@triton.jit
def tile_of(of_rows, at, columns, EVEN: tl.constexpr):
    """of_rows: [N, 1] pointers; at: [W]. Zeros past the columns."""
    if EVEN:
        return tl.load(of_rows + at[None, :])
    return tl.load(of_rows + at[None, :], mask=(at < columns)[None, :], other=0.0)


@triton.jit
def _plain(
    acc, acc_up, gate, ups, x_rows, inside, begin, end,
    K: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, GATED: tl.constexpr, STAGES: tl.constexpr,
    CT: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BK)
    for k in tl.range(begin, end, BK, num_stages=STAGES):
        there = inside & (k + at < K)[None, :]
        v = tl.trans(tl.load(x_rows + (k + at)[None, :], mask=there, other=0.0).to(CT))
        acc = tl.dot(tile_of(gate, k + at, K, EVEN).to(CT), v, acc, input_precision="ieee")
        if GATED:
            acc_up = tl.dot(tile_of(ups, k + at, K, EVEN).to(CT), v, acc_up, input_precision="ieee")
    return acc, acc_up


@triton.jit
def _float8(
    acc, acc_up, gate, ups, gate_scale, up_scale, x_rows, inside, begin, end,
    K: tl.constexpr, BK: tl.constexpr, COLUMNS: tl.constexpr, GATED: tl.constexpr, STAGES: tl.constexpr,
    CT: tl.constexpr,
):  # fmt: skip
    """gate_scale, up_scale: [BN] pointers to the rows of scales; each is for COLUMNS columns.

    Columns past the last one read that one, and meet zeros.
    """
    at = tl.arange(0, BK)
    for k in tl.range(begin, end, BK, num_stages=STAGES):
        there = inside & (k + at < K)[None, :]
        v = tl.trans(tl.load(x_rows + (k + at)[None, :], mask=there, other=0.0).to(CT))
        column = k + at
        if K % BK != 0:
            column = tl.minimum(column, K - 1)
        own = tl.dot(tl.load(gate + column[None, :]).to(CT), v, input_precision="ieee")
        acc += own * tl.load(gate_scale + k // COLUMNS)[:, None]
        if GATED:
            own = tl.dot(tl.load(ups + column[None, :]).to(CT), v, input_precision="ieee")
            acc_up += own * tl.load(up_scale + k // COLUMNS)[:, None]
    return acc, acc_up


@triton.jit
def unpacked(
    words, scales, k, K: tl.constexpr, FORMAT: tl.constexpr, WORDS: tl.constexpr, EVEN: tl.constexpr,
    CT: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Eight tiles [BN, WORDS] of weights, of columns k … k + 8 * WORDS - 1."""
    PER: tl.constexpr = 2 if FORMAT == NVFP4 else 4  # words that a scale serves
    GROUPS: tl.constexpr = WORDS // PER
    packed = tile_of(words, k // 8 + tl.arange(0, WORDS), K // 8, EVEN)
    scale = tile_of(scales, k // (8 * PER) + tl.arange(0, GROUPS), K // (8 * PER), EVEN)
    return unpack(packed, by_word(scale, PER), FORMAT, CT, PAIRS)


@triton.jit
def by_word(scale, PER: tl.constexpr):
    """[BN, groups] -> [BN, words], PER words a group."""
    BN: tl.constexpr = scale.shape[0]
    GROUPS: tl.constexpr = scale.shape[1]
    return tl.broadcast_to(scale[:, :, None], [BN, GROUPS, PER]).reshape([BN, GROUPS * PER])


@triton.jit
def _packed(
    acc, acc_up, gate, ups, gate_scale, up_scale, x_rows, inside, begin, end,
    K: tl.constexpr, FORMAT: tl.constexpr, WORDS: tl.constexpr, EVEN: tl.constexpr, GATED: tl.constexpr,
    STAGES: tl.constexpr, CT: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """x_rows: columns in the order of ``unpack``, zeros past the last one."""
    at = tl.arange(0, WORDS)
    for k in tl.range(begin, end, 8 * WORDS, num_stages=STAGES):
        tiles = unpacked(gate, gate_scale, k, K, FORMAT, WORDS, EVEN, CT, PAIRS)
        tiles_up = tiles
        if GATED:
            tiles_up = unpacked(ups, up_scale, k, K, FORMAT, WORDS, EVEN, CT, PAIRS)
        for i in tl.static_range(8):
            v = tl.trans(tl.load(x_rows + (k + i * WORDS + at)[None, :], mask=inside, other=0.0).to(CT))
            acc = tl.dot(tiles[i], v, acc, input_precision="ieee")
            if GATED:
                acc_up = tl.dot(tiles_up[i], v, acc_up, input_precision="ieee")
    return acc, acc_up


@triton.jit
def sums(
    x_rows, w, scale, expert, row, n, inside, begin, end,
    N: tl.constexpr, K: tl.constexpr, FORMAT: tl.constexpr, SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr, GATED: tl.constexpr, WORDS: tl.constexpr, STAGES: tl.constexpr,
    PAIRS: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """Columns begin … end - 1, [BN, BM] of gate and of up, in any format.

    row: [BN] rows of all experts' matrices, one below the other; n: [BN] of this expert's; x_rows and inside:
    [BM, 1].
    """
    acc = tl.zeros([row.shape[0], x_rows.shape[0]], tl.float32)
    acc_up = tl.zeros([row.shape[0], x_rows.shape[0]], tl.float32)
    if FORMAT == 0:
        gate = w + row[:, None] * K
        acc, acc_up = _plain(
            acc, acc_up, gate, gate + N * K, x_rows, inside, begin, end, K, WORDS, K % WORDS == 0, GATED,
            STAGES, CT,
        )  # fmt: skip
    elif FORMAT == FP8:
        gate = w + row[:, None] * K
        COLUMN_BLOCKS: tl.constexpr = (K + SCALE_COLUMNS - 1) // SCALE_COLUMNS
        ROW_BLOCKS: tl.constexpr = (N + SCALE_ROWS - 1) // SCALE_ROWS
        of_expert = expert.to(tl.int64) * (2 * ROW_BLOCKS if GATED else ROW_BLOCKS)
        gate_scale = scale + (of_expert + n // SCALE_ROWS) * COLUMN_BLOCKS
        acc, acc_up = _float8(
            acc, acc_up, gate, gate + N * K, gate_scale, gate_scale + ROW_BLOCKS * COLUMN_BLOCKS, x_rows,
            inside, begin, end, K, WORDS, SCALE_COLUMNS, GATED, STAGES, CT,
        )  # fmt: skip
    else:
        GROUPS: tl.constexpr = K // (16 if FORMAT == NVFP4 else 32)
        gate = w + row[:, None] * (K // 8)
        gate_scale = scale + row[:, None] * GROUPS
        acc, acc_up = _packed(
            acc, acc_up, gate, gate + N * (K // 8), gate_scale, gate_scale + N * GROUPS, x_rows, inside,
            begin, end, K, FORMAT, WORDS, K % (8 * WORDS) == 0, GATED, STAGES, CT, PAIRS,
        )  # fmt: skip
    return acc, acc_up


@triton.jit
def merge_splits(
    part, counter, acc, acc_up, row, n, inside, num_pairs, N, SPLIT: tl.constexpr, GATED: tl.constexpr
):
    """Whoever comes last has the sums of all splits, added in their order: the same bits at every run.

    acc, acc_up: [BN, BM]; row: [BM], n: [BN].
    """
    WIDTH = N * 2 if GATED else N
    at = row.to(tl.int64)[None, :] * WIDTH + n[:, None]
    target = part + tl.program_id(2).to(tl.int64) * num_pairs * WIDTH + at
    tl.store(target, acc, mask=inside)
    if GATED:
        tl.store(target + N, acc_up, mask=inside)
    last = arrive(counter, SPLIT)
    if last:
        acc, acc_up = tl.zeros_like(acc), tl.zeros_like(acc_up)
        for other in tl.static_range(SPLIT):
            source = part + other * num_pairs.to(tl.int64) * WIDTH + at
            acc += tl.load(source, mask=inside, other=0.0, cache_modifier=".cg")
            if GATED:
                acc_up += tl.load(source + N, mask=inside, other=0.0, cache_modifier=".cg")
    return acc, acc_up, last


@triton.jit
def _packed_order(n, WORDS: tl.constexpr):
    """Where columns n lie for a product of packed words, WORDS a pass; 0: where they are."""
    at = n
    if WORDS > 0:
        within = n % (8 * WORDS)
        at = n - within + (within % 8) * WORDS + within // 8
    return at


@triton.jit
def finished(
    acc, acc_up, global_scale, bias, expert, n,
    N: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, CLAMPED: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """Sums with scales of whole matrices, biases and the activation. n: the rows, shaped to be broadcast with
    the sums; none past the last one."""
    if PARTS > 0:
        acc *= tl.load(global_scale + expert * PARTS) * (256.0 if PAIRS else 1.0)
        if GATED:
            acc_up *= tl.load(global_scale + expert * PARTS + PARTS - 1) * (256.0 if PAIRS else 1.0)
    if BIAS:
        own_bias = bias + expert.to(tl.int64) * (2 * N if GATED else N) + n
        acc += tl.load(own_bias).to(tl.float32)
        if GATED:
            acc_up += tl.load(own_bias + N).to(tl.float32)
    if GATED:
        if CLAMPED:  # GPT-OSS's; a NaN stays one
            gate = tl.where(acc > 7.0, 7.0, acc)
            up = tl.where(acc_up > 7.0, 7.0, tl.where(acc_up < -7.0, -7.0, acc_up))
            acc = gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)
        else:
            acc = acc / (1.0 + tl.exp(-acc)) * acc_up
    return acc


@triton.jit(do_not_specialize=["num_pairs"])
def expert_kernel(
    x,  # rows by token if GATED, by place otherwise; in the order of packed words for packed weights
    w,  # [E, N, K] or [E, N, K / 8]; 2 * N rows if GATED, those of the gate first
    scale,  # [E, rows, groups]
    global_scale,  # [E, 1 or 2] if HAS_GLOBAL
    bias,  # [E, rows] if BIAS
    blocks,  # [blocks, 3]
    order,  # [pairs]
    out,  # GATED: [pairs, OUT_WIDTH] by place, else [pairs, N] by pair
    part,  # [SPLIT, pairs, rows] float32 if SPLIT > 1
    counters,  # [blocks, tiles] int32 if SPLIT > 1: zeros, and zeros again afterwards
    num_pairs,
    x_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    OUT_WORDS: tl.constexpr,  # columns of ``out`` are put in the order of packed words; 0: they are left
    FORMAT: tl.constexpr,
    PARTS: tl.constexpr,  # scales of a whole matrix: 0, 1 or 2
    SCALE_ROWS: tl.constexpr,  # FP8: rows and columns that a scale serves
    SCALE_COLUMNS: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    CLAMPED: tl.constexpr,  # the activation is GPT-OSS's, else silu
    BM: tl.constexpr,
    BN: tl.constexpr,
    WORDS: tl.constexpr,  # PLAIN, FP8: columns a pass
    CHUNK: tl.constexpr,  # columns that a split takes
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    PAIRS: tl.constexpr,
    CT: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    block = tl.program_id(1)
    expert = tl.load(blocks + block * BLOCK_FIELDS)
    if expert < 0:
        return
    count = tl.load(blocks + block * BLOCK_FIELDS + 1)
    place = tl.load(blocks + block * BLOCK_FIELDS + 2)
    m = tl.arange(0, BM)
    inside = m < count
    pair = tl.load(order + place + m, mask=inside, other=0)
    x_rows = x + (pair // TOP_K if GATED else place + m).to(tl.int64)[:, None] * x_stride
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    # Rows past the last one read one that is there, and are not stored.
    row = expert.to(tl.int64) * (2 * N if GATED else N) + tl.minimum(n, N - 1)
    begin = tl.program_id(2) * CHUNK
    end = tl.minimum(begin + CHUNK, K)
    acc, acc_up = sums(
        x_rows, w, scale, expert, row, tl.minimum(n, N - 1), inside[:, None], begin, end, N, K, FORMAT,
        SCALE_ROWS, SCALE_COLUMNS, GATED, WORDS, STAGES, PAIRS, CT,
    )  # fmt: skip
    within = (n < N)[:, None] & inside[None, :]
    complete = True
    if SPLIT > 1:
        counter = counters + block * tl.num_programs(0) + tl.program_id(0)
        acc, acc_up, complete = merge_splits(
            part, counter, acc, acc_up, place + m, n, within, num_pairs, N, SPLIT, GATED
        )
    if complete:
        acc = finished(
            acc, acc_up, global_scale, bias, expert, tl.minimum(n, N - 1)[:, None], N, PARTS, BIAS, GATED,
            CLAMPED, PAIRS,
        )  # fmt: skip
        column = _packed_order(n, OUT_WORDS)
        target = out + (place + m if GATED else pair).to(tl.int64)[None, :] * OUT_WIDTH + column[:, None]
        tl.store(target, acc.to(out.dtype.element_ty), mask=within)


@triton.jit
def rows_kernel(
    x,  # rows by place, in the order of packed words
    w,  # [E, N, K / 8], K at most the columns of a pass
    scale,  # [E, N, groups]
    global_scale,  # [E, 1] if PARTS
    bias,  # [E, N] if BIAS
    blocks,  # [blocks, 3]
    order,  # [pairs]
    out,  # [pairs, N] by pair
    x_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    WORDS: tl.constexpr,
    ROW_TILES: tl.constexpr,
    STAGES: tl.constexpr,
    PAIRS: tl.constexpr,
    CT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Where one pass takes all columns: a program takes ROW_TILES tiles of rows in turn, the next ones on
    their way. x is read once."""
    begin_dependent(PDL)
    block = tl.program_id(1)
    expert = tl.load(blocks + block * BLOCK_FIELDS)
    if expert < 0:
        return
    place = tl.load(blocks + block * BLOCK_FIELDS + 2)
    m, at = tl.arange(0, BM), tl.arange(0, WORDS)
    inside = m < tl.load(blocks + block * BLOCK_FIELDS + 1)
    pair = tl.load(order + place + m, mask=inside, other=0).to(tl.int64)
    v = _all_columns(x + (place + m).to(tl.int64)[:, None] * x_stride + at[None, :], inside, WORDS, CT)
    GROUPS: tl.constexpr = K // (16 if FORMAT == NVFP4 else 32)
    first = tl.program_id(0) * ROW_TILES
    for tile in tl.range(first, tl.minimum(first + ROW_TILES, tl.cdiv(N, BN)), num_stages=STAGES):
        n = tile * BN + tl.arange(0, BN)
        row = expert.to(tl.int64) * N + tl.minimum(n, N - 1)
        tiles = unpacked(
            w + row[:, None] * (K // 8), scale + row[:, None] * GROUPS, 0, K, FORMAT, WORDS,
            K == 8 * WORDS, CT, PAIRS,
        )  # fmt: skip
        acc = tl.zeros([BN, BM], tl.float32)
        for i in tl.static_range(8):
            acc = tl.dot(tiles[i], v[i], acc, input_precision="ieee")
        there = tl.minimum(n, N - 1)[:, None]
        acc = finished(acc, acc, global_scale, bias, expert, there, N, PARTS, BIAS, False, False, PAIRS)
        target = out + pair[None, :] * N + n[:, None]
        tl.store(target, acc.to(out.dtype.element_ty), mask=(n < N)[:, None] & inside[None, :])


@triton.jit
def _all_columns(x_rows, inside, WORDS: tl.constexpr, CT: tl.constexpr):
    """Eight tiles [WORDS, BM]. x_rows: [BM, WORDS] pointers to the first one."""
    some = inside[:, None]
    return (
        tl.trans(tl.load(x_rows, mask=some, other=0.0).to(CT)),
        tl.trans(tl.load(x_rows + WORDS, mask=some, other=0.0).to(CT)),
        tl.trans(tl.load(x_rows + 2 * WORDS, mask=some, other=0.0).to(CT)),
        tl.trans(tl.load(x_rows + 3 * WORDS, mask=some, other=0.0).to(CT)),
        tl.trans(tl.load(x_rows + 4 * WORDS, mask=some, other=0.0).to(CT)),
        tl.trans(tl.load(x_rows + 5 * WORDS, mask=some, other=0.0).to(CT)),
        tl.trans(tl.load(x_rows + 6 * WORDS, mask=some, other=0.0).to(CT)),
        tl.trans(tl.load(x_rows + 7 * WORDS, mask=some, other=0.0).to(CT)),
    )

"""Choosing tokens in Triton: noise, penalties, filters, argmax.

What must be bit-equal to the reference is: the hash and the uniform number made from it. Scores may
differ by the rounding of a logarithm. No kernel here lets the compiler fuse a product into a sum
(``enable_fp_fusion=False`` at launch), so that a score does not depend on how it was compiled.
"""

import triton
import triton.language as tl

from sgl_kernel.common.kernels import begin_dependent

# Constants of the hash: those of sglang.srt.sampling.gumbel, which says where they are from.
MUL_A = tl.constexpr(0x21F0AAAD)
MUL_B = tl.constexpr(0x735A2D97)
MUL_C = tl.constexpr(0x31848BAB)
LARGEST = tl.constexpr(3.4028234663852886e38)  # of float32


@triton.jit
def _mix(x):
    """A bijection of the 32-bit integers; products wrap."""
    x = x ^ (x >> 16)
    x = x * MUL_A
    x = x ^ (x >> 15)
    x = x * MUL_B
    return x ^ (x >> 15)


@triton.jit
def _round(left, right, counter, KEY: tl.constexpr):
    """One round of the Feistel network that makes a row's keys."""
    key = tl.full([], KEY, tl.uint32)
    return right, left ^ _mix((right + counter) ^ key), _mix(counter ^ key)


@triton.jit
def row_keys(seed, index):
    """Two uint32 keys of (seed int64, index of the token being chosen)."""
    left = seed.to(tl.uint32)
    right = (seed >> 32).to(tl.uint32)
    counter = index.to(tl.uint32)
    left, right, counter = _round(left, right, counter, 0x243F6A88)
    left, right, counter = _round(left, right, counter, 0x85A308D3)
    left, right, counter = _round(left, right, counter, 0x13198A2E)
    left, right, counter = _round(left, right, counter, 0x03707344)
    return left, right


@triton.jit
def random_bits(token_ids, left, right):
    """32 random bits for each id, uint32."""
    x = token_ids.to(tl.uint32) ^ left
    x = x ^ (x >> 16)
    x = x * MUL_A
    x = x ^ right
    x = x ^ (x >> 15)
    x = x * MUL_B
    x = x ^ (x >> 15)
    x = x * MUL_C
    return x ^ (x >> 16)


@triton.jit
def uniform(bits):
    """(bits + 0.5) / 2**32 with the roundings of the reference: through int32, in this order."""
    signed = bits.to(tl.int32, bitcast=True)
    u = signed.to(tl.float32) + tl.where(signed < 0, 4294967296.0, 0.0)
    u = (u + 0.5) * 2.3283064365386963e-10
    return tl.minimum(u, 0.999999940395355224609375)  # 1 - 2**-24


@triton.jit
def gumbel(bits):
    """-log(-log1p(-u)). log1p by Kahan's correction: 1 - u loses digits of u, and their loss is known."""
    u = uniform(bits)
    rest = 1.0 - u
    lost = tl.where(rest == 1.0, -1.0, rest - 1.0)
    exponential = tl.where(rest == 1.0, u, tl.log(rest) * tl.div_rn(u, lost))
    return -tl.log(exponential)


@triton.jit
def is_finite(x):
    return tl.abs(x) <= LARGEST  # false for NaN too


@triton.jit
def noise_kernel(
    seed,  # [N] int64
    index,  # [N] int64
    token_ids,  # [V], read if HAS_IDS
    out,  # [N, V] float32, or int32 bits if BITS
    VOCAB,
    HAS_IDS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < VOCAB
    ids = column
    if HAS_IDS:
        ids = tl.load(token_ids + column, mask=inside, other=0)
    left, right = row_keys(tl.load(seed + row), tl.load(index + row))
    bits = random_bits(ids, left, right)
    if BITS:
        tl.store(out + row * VOCAB + column, bits.to(tl.int32, bitcast=True), mask=inside)
    else:
        tl.store(out + row * VOCAB + column, gumbel(bits), mask=inside)


@triton.jit
def node_number(lines, line, LINES: tl.constexpr):
    """Which of all R * NODES nodes a line of logits belongs to."""
    number = line
    if LINES:
        number = tl.load(lines + line).to(tl.int64)
    return number


@triton.jit
def node_index(root, depths, row, node, offset, NODES: tl.constexpr, DEPTHS: tl.constexpr):
    """Index in the sequence of the token chosen at a node. DEPTHS: 0 shared, 1 a chain, 2 a tree."""
    index = tl.load(root + row).to(tl.int64) + offset
    if DEPTHS == 1:
        index += node
    if DEPTHS == 2:
        index += tl.load(depths + row * NODES + node).to(tl.int64)
    return index


@triton.jit
def block_scores(logits, column, inside, ids, heat, cutoff, left, right, CUTOFF: tl.constexpr):
    """What is ranked of one block of a row: raw logits at T = 0, else logits / T + noise; and if a
    logit is not finite."""
    value = tl.load(logits + column, mask=inside, other=0.0).to(tl.float32)
    broken = tl.max((is_finite(value) == 0).to(tl.int32), 0)
    score = value
    if heat > 0:
        score = tl.div_rn(value, heat)
        if CUTOFF:
            score = tl.where(score < cutoff, float("-inf"), score)
        score += gumbel(random_bits(ids, left, right))
    # NaN takes no part, so that the id found is inside the vocabulary whatever the logits are.
    score = tl.where(inside & (score == score), score, float("-inf"))
    return score, broken


@triton.jit
def choose_partial_kernel(
    logits,  # [R * NODES, VOCAB] or [T, VOCAB]; what follows has as many lines
    token_ids,  # [VOCAB] target ids, read if HAS_IDS
    slots,  # [R]
    root,  # [R]
    lines,  # [T] int64 numbers of nodes if LINES; else there is a line for each
    depths,  # [R, NODES] if DEPTHS == 2
    temperature,  # [slots] float32; 0: greedy
    seed,  # [slots] int64
    cutoffs,  # [R * NODES] float32 if CUTOFF
    part_score,  # [R * NODES, blocks] float32
    part_column,  # [R * NODES, blocks] int32
    part_broken,  # [R * NODES, blocks] int32
    logits_stride,
    VOCAB,
    offset,
    NODES: tl.constexpr,
    DEPTHS: tl.constexpr,
    LINES: tl.constexpr,
    HAS_IDS: tl.constexpr,
    CUTOFF: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    block = tl.program_id(0)
    line = tl.program_id(1).to(tl.int64)
    number = node_number(lines, line, LINES)
    row = number // NODES
    slot = tl.load(slots + row).to(tl.int64)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < VOCAB
    ids = column
    if HAS_IDS:
        ids = tl.load(token_ids + column, mask=inside, other=0)
    index = node_index(root, depths, row, number % NODES, offset, NODES, DEPTHS)
    left, right = row_keys(tl.load(seed + slot), index)
    cutoff = float("-inf")
    if CUTOFF:
        cutoff = tl.load(cutoffs + line)
    heat = tl.load(temperature + slot)
    row_logits = logits + line * logits_stride
    score, broken = block_scores(row_logits, column, inside, ids, heat, cutoff, left, right, CUTOFF)
    best, where = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
    part = line * tl.num_programs(0) + block
    tl.store(part_score + part, best)
    tl.store(part_column + part, block * BLOCK + where)
    tl.store(part_broken + part, broken)


@triton.jit
def choose_finish_kernel(
    part_score,  # [R * NODES, BLOCKS]
    part_column,
    part_broken,
    token_ids,  # [VOCAB] if HAS_IDS
    tokens,  # [R * NODES, …] int64, written at token_stride
    faulty,  # [R * NODES] bool, if FAULTS
    BLOCKS,
    token_stride,
    HAS_IDS: tl.constexpr,
    FAULTS: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    line = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, PADDED)
    inside = block < BLOCKS
    part = line * BLOCKS + block
    score = tl.load(part_score + part, mask=inside, other=float("-inf"))
    # Blocks are in the order of their ids: the first of equal ones holds the lowest id.
    _, first = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
    token = tl.load(part_column + line * BLOCKS + first).to(tl.int64)
    if HAS_IDS:
        token = tl.load(token_ids + token).to(tl.int64)
    if FAULTS:
        broken = tl.max(tl.load(part_broken + part, mask=inside, other=0), 0)
        token = tl.where(broken > 0, 0, token)
        tl.store(faulty + line, broken > 0)
    tl.store(tokens + line * token_stride, token)

"""Penalties, biases and suppressed ids in Triton, for the rows that ask for them."""

import triton
import triton.language as tl

from sgl_kernel.common.kernels import begin_dependent
from sgl_kernel.sampling.kernels import LARGEST, is_finite, node_index, node_number

PENALTIES = tl.constexpr(1)
BIASES = tl.constexpr(2)
SUPPRESSION = tl.constexpr(4)


@triton.jit
def _times_put_out(
    token_counts, tokens, mask, row, node, column, inside, NODES: tl.constexpr, MASK: tl.constexpr
):
    """How often each id is among a row's outputs and the drafts on the path to the node."""
    count = tl.load(token_counts + column, mask=inside, other=0)
    for i in range(1, NODES):
        on_path = i <= node
        if MASK:
            on_path = tl.load(mask + (row * NODES + node) * NODES + i) != 0
        if on_path:
            draft = tl.load(tokens + row * NODES + i)
            count += (column == draft).to(tl.int32)
    return count


@triton.jit
def _penalised(value, count, frequency, presence, repetition):
    seen = count > 0
    value = value - frequency * count.to(tl.float32)
    value = value - presence * seen.to(tl.float32)
    scale = tl.where(seen, repetition, 1.0)
    return tl.where(value < 0, value * scale, tl.div_rn(value, scale))


@triton.jit
def _biased(value, column, ids, biases, number):
    for i in range(number):
        value = tl.where(column == tl.load(ids + i), value + tl.load(biases + i), value)
    return value


@triton.jit
def _silenced(value, column, ids, number):
    for i in range(number):
        value = tl.where(column == tl.load(ids + i), -LARGEST, value)
    return value


@triton.jit
def apply_rules_kernel(
    logits,  # [R * NODES, VOCAB] or [T, VOCAB] float32, changed in place
    slots,  # [R]
    root,  # [R] index of the root's token
    lines,  # [T] int64 numbers of nodes if LINES; else there is a line for each
    depths,  # [R, NODES] if DEPTHS == 2
    tokens,  # [R, NODES] int64 the nodes' own tokens
    mask,  # [R, NODES, NODES] bool ancestor-or-self, if MASK
    asks,  # [slots] int32 sum of the flags above
    token_counts,  # [slots, VOCAB] int32
    frequency,  # [slots] float32
    presence,  # [slots] float32
    repetition,  # [slots] float32
    bias_ids,  # [slots, BIAS_WIDTH] int64
    biases,  # [slots, BIAS_WIDTH] float32
    num_biases,  # [slots] int32
    suppressed_ids,  # [slots, SUPPRESSED_WIDTH] int64
    num_suppressed,  # [slots] int32
    free_from,  # [slots] int64
    logits_stride,
    VOCAB,
    BIAS_WIDTH,
    SUPPRESSED_WIDTH,
    NODES: tl.constexpr,
    DEPTHS: tl.constexpr,
    MASK: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    line = tl.program_id(1).to(tl.int64)
    which = node_number(lines, line, LINES)
    row, node = which // NODES, which % NODES
    slot = tl.load(slots + row).to(tl.int64)
    flags = tl.load(asks + slot)
    if flags != 0:
        early = node_index(root, depths, row, node, 1, NODES, DEPTHS) < tl.load(free_from + slot)
        bias_list, silent_list = slot * BIAS_WIDTH, suppressed_ids + slot * SUPPRESSED_WIDTH
        for first in range(tl.program_id(0) * BLOCK, VOCAB, tl.num_programs(0) * BLOCK):
            column = first + tl.arange(0, BLOCK)
            inside = column < VOCAB
            target = logits + line * logits_stride + column
            raw = tl.load(target, mask=inside, other=0.0)
            value = raw
            if (flags & PENALTIES) != 0:
                counts = token_counts + slot * VOCAB
                count = _times_put_out(counts, tokens, mask, row, node, column, inside, NODES, MASK)
                value = _penalised(
                    value,
                    count,
                    tl.load(frequency + slot),
                    tl.load(presence + slot),
                    tl.load(repetition + slot),
                )
            if (flags & BIASES) != 0:
                number = tl.load(num_biases + slot)
                value = _biased(value, column, bias_ids + bias_list, biases + bias_list, number)
            # Stays finite: what is not finite means, further down, that the logits came so.
            value = tl.minimum(tl.maximum(value, -LARGEST), LARGEST)
            if ((flags & SUPPRESSION) != 0) & early:
                value = _silenced(value, column, silent_list, tl.load(num_suppressed + slot))
            tl.store(target, tl.where(is_finite(raw), value, raw), mask=inside)


@triton.jit
def count_outputs_kernel(
    token_counts,  # [slots, VOCAB] int32
    asks,  # [slots] int32
    slots,  # [R]
    tokens,  # [R, …] int64 put out, columns adjacent
    counts,  # [R] how many of them
    token_stride,
    VOCAB,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if (tl.load(asks + slot) & PENALTIES) != 0:
        count = tl.load(counts + row)
        for column in range(COLUMNS):
            if column < count:
                token = tl.load(tokens + row * token_stride + column)
                tl.atomic_add(token_counts + slot * VOCAB + token, 1)

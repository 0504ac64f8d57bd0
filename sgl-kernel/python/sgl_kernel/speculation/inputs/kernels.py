"""The input of a draft layer: an embedding and a hidden state, each normed, side by side."""

import triton
import triton.language as tl

from sgl_kernel.common.kernels import begin_dependent


@triton.jit
def _normed(value, weight, eps, SIZE: tl.constexpr, DT: tl.constexpr):
    """value: float32, 0 beyond SIZE. Rounded before the weight, as the norm's own kernel does."""
    scale = tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
    return ((value * scale).to(DT).to(tl.float32) * weight).to(DT)


@triton.jit
def pair_inputs_kernel(
    ids,  # [R, COLUMNS] int64, or [slots] if BY_SLOT
    embedding,  # [V, SIZE]
    features,  # [rows, SIZE], or [slots, SIZE] if BY_SLOT
    nodes,  # [R, COLUMNS] int64 if HAS_NODES: which of a row's NODES features
    embed_weight,  # [SIZE]
    feature_weight,  # [SIZE]
    slots,  # [R] if BY_SLOT or KEEP
    counts,  # [R] int64 if KEEP
    kept,  # [slots, SIZE] if KEEP: gets the feature of each row's last counted column
    out,  # [R * COLUMNS, 2 * SIZE]
    hidden,  # [R * COLUMNS, SIZE] if HIDDEN: gets the features themselves
    id_stride,
    feature_stride,
    embed_eps,
    feature_eps,
    pad_slot,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    NODES: tl.constexpr,
    BY_SLOT: tl.constexpr,
    HAS_NODES: tl.constexpr,
    KEEP: tl.constexpr,
    HIDDEN: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row, column = token // COLUMNS, token % COLUMNS
    element = tl.arange(0, BLOCK)
    inside = element < SIZE
    w_embed = tl.load(embed_weight + element, mask=inside, other=0.0).to(tl.float32)
    w_feature = tl.load(feature_weight + element, mask=inside, other=0.0).to(tl.float32)
    begin_dependent(PDL)
    source = row * NODES + column
    at_id = row * id_stride + column
    if HAS_NODES:
        source = row * NODES + tl.load(nodes + token)
    if BY_SLOT:
        source = tl.load(slots + row).to(tl.int64)
        at_id = source
    feature = tl.load(features + source * feature_stride + element, mask=inside, other=0.0)
    if KEEP:
        slot = tl.load(slots + row).to(tl.int64)
        last = tl.maximum(tl.load(counts + row) - 1, 0)
        keep = (column == last) & (slot != pad_slot)
        tl.store(kept + slot * SIZE + element, feature, mask=inside & keep)
    if HIDDEN:
        tl.store(hidden + token * SIZE + element, feature, mask=inside)
    DT: tl.constexpr = out.dtype.element_ty
    id = tl.load(ids + at_id).to(tl.int64)
    embed = tl.load(embedding + id * SIZE + element, mask=inside, other=0.0).to(tl.float32)
    target = out + token * (2 * SIZE) + element
    tl.store(target, _normed(embed, w_embed, embed_eps, SIZE, DT), mask=inside)
    tl.store(target + SIZE, _normed(feature.to(tl.float32), w_feature, feature_eps, SIZE, DT), mask=inside)

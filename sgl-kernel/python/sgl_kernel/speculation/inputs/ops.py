"""The input of a draft layer, of a forward and of a sync alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from sgl_kernel._dispatch import device_info, use_kernel
from sgl_kernel.launch import Launch, next_power_of_2


@dataclass(frozen=True, slots=True)
class PairWeights:
    embedding: torch.Tensor  # [V, H]
    embed_norm: torch.Tensor  # [H]
    feature_norm: torch.Tensor  # [H]
    embed_eps: float
    feature_eps: float


@dataclass(frozen=True, slots=True)
class Keep:
    """Where a sync leaves the feature of each row's last accepted column."""

    features: torch.Tensor  # [slots, H], the state's ``draft_feature``
    slots: torch.Tensor  # [R]
    counts: torch.Tensor  # [R] int64
    pad_slot: int = 0  # keeps its own


def pair_inputs(
    ids: torch.Tensor,
    features: torch.Tensor,
    weights: PairWeights,
    out: torch.Tensor,
    *,
    nodes: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    keep: Keep | None = None,
    hidden: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """out [T, 2 * H] = norm(embedding[id]) beside norm(feature), for T = R * C pairs.

    ids: [R, C] int64, columns adjacent; features: [R * N, H], of which row r's column c takes number
    ``nodes[r, c]`` of its N (nodes: [R, C] int64; None: N = C, its own); or, with ``slots`` [R] given,
    ids [slots] int64 and features [slots, H] are a slot's, and C is 1. hidden: [T, H], gets the features
    themselves (a draft layer's residual). Norms are root mean square with float32 statistics.
    """
    if out.shape[0] == 0:
        return out
    if use_kernel(out):
        pair_launch(ids, features, weights, out, nodes, slots, keep, hidden, pdl=pdl).run()
    else:
        pair_inputs_ref(ids, features, weights, out, nodes, slots, keep, hidden)
    return out


def pair_inputs_ref(
    ids: torch.Tensor,
    features: torch.Tensor,
    weights: PairWeights,
    out: torch.Tensor,
    nodes: torch.Tensor | None,
    slots: torch.Tensor | None,
    keep: Keep | None,
    hidden: torch.Tensor | None,
) -> None:
    size = out.shape[1] // 2
    if slots is not None:
        ids, features = ids[slots.to(torch.int64)][:, None], features[slots.to(torch.int64)]
    elif nodes is not None:
        per_row = features.view(ids.shape[0], -1, size)
        features = per_row.gather(1, nodes[:, :, None].expand(-1, -1, size)).flatten(0, 1)
    if keep is not None:
        last = (keep.counts - 1).clamp(min=0)
        of_rows = features.view(*ids.shape, size)[torch.arange(ids.shape[0]), last]
        real = keep.slots != keep.pad_slot
        keep.features[keep.slots[real].to(torch.int64)] = of_rows[real]
    if hidden is not None:
        hidden.copy_(features)
    embed = F.embedding(ids.reshape(-1), weights.embedding)
    out[:, :size] = _normed(embed, weights.embed_eps) * weights.embed_norm
    out[:, size:] = _normed(features, weights.feature_eps) * weights.feature_norm


def _normed(x: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x.float(), (x.shape[-1],), None, eps).to(x.dtype)


def pair_launch(
    ids: torch.Tensor,
    features: torch.Tensor,
    weights: PairWeights,
    out: torch.Tensor,
    nodes: torch.Tensor | None,
    slots: torch.Tensor | None,
    keep: Keep | None,
    hidden: torch.Tensor | None,
    *,
    pdl: bool,
) -> Launch:
    from sgl_kernel.speculation.inputs.kernels import pair_inputs_kernel

    num_tokens, size = out.shape[0], out.shape[1] // 2
    num_columns = 1 if slots is not None else ids.shape[1]
    num_rows = num_tokens // num_columns
    assert out.is_contiguous() and ids.stride(-1) == features.stride(1) == 1
    assert weights.embedding.is_contiguous() and not (slots is not None and nodes is not None)
    num_nodes = features.shape[0] // num_rows if nodes is not None else num_columns
    of_rows = slots if keep is None else keep.slots
    kept = out if keep is None else keep.features
    assert kept.is_contiguous() and (hidden is None or hidden.is_contiguous())
    block = next_power_of_2(size)
    pdl = pdl and device_info(out.device).has_pdl
    return Launch(
        pair_inputs_kernel,
        (num_tokens,),
        (
            ids,
            weights.embedding,
            features,
            ids if nodes is None else nodes,
            weights.embed_norm,
            weights.feature_norm,
            ids if of_rows is None else of_rows,
            ids if keep is None else keep.counts,
            kept,
            out,
            out if hidden is None else hidden,
            ids.stride(0),
            features.stride(0),
            weights.embed_eps,
            weights.feature_eps,
            0 if keep is None else keep.pad_slot,
        ),
        {
            "SIZE": size,
            "BLOCK": block,
            "COLUMNS": num_columns,
            "NODES": num_nodes,
            "BY_SLOT": slots is not None,
            "HAS_NODES": nodes is not None,
            "KEEP": keep is not None,
            "HIDDEN": hidden is not None,
            "PDL": pdl,
        },
        num_warps=max(1, min(8, block // 256)),
        pdl=pdl,
    )

"""What latent attention means, in plain PyTorch."""

from __future__ import annotations

import math

import torch

from sgl_kernel.attention.decode.plan import DecodePlan
from sgl_kernel.attention.decode.reference import pool_places


def latent_attention_ref(
    q: torch.Tensor,
    latents: torch.Tensor,
    plan: DecodePlan,
    scale: float,
    kv_scale: torch.Tensor | None,
    scratch: torch.Tensor | None = None,
) -> torch.Tensor:
    """As ``latent_attention``, a row at a time, in float64 for float64 inputs and float32 otherwise."""
    view, shape = plan.view, plan.shape
    out = q.new_zeros(*q.shape[:2], shape.head_dim)
    queries = q.reshape(-1, view.query_len, *q.shape[1:])
    for row, (slot, base) in enumerate(zip(plan.slots.tolist(), plan.base_lens.tolist(), strict=True)):
        if slot == 0:
            continue
        positions = torch.arange(base + (0 if view.scratch else view.extra), device=q.device)
        places = pool_places(plan, torch.full_like(positions, slot), positions)
        own = latents[places.clamp(min=0)]  # [len, R + r]
        if scratch is not None:
            # Scratch places may stand in the page table too, below 0: an indexer's choice has them.
            in_scratch = scratch.flatten(0, 1)[(-1 - places).clamp(min=0)]
            own = torch.where((places < 0)[:, None], in_scratch, own)
            if view.extra:
                own = torch.cat((own, scratch[row, : view.extra]))
        seen = torch.ones(view.query_len, own.shape[0], dtype=torch.bool, device=q.device)
        if view.causal:
            seen[:, base:] = torch.ones_like(seen[:, base:]).tril()
        elif view.mask is not None:
            seen[:, base:] = view.mask[row]
        result = attend_latents(queries[row], own, seen, shape.head_dim, scale, kv_scale)
        out[row * view.query_len : (row + 1) * view.query_len] = result.to(q.dtype)
    return out


def attend_latents(
    q: torch.Tensor,
    latents: torch.Tensor,
    seen: torch.Tensor,
    latent_dim: int,
    scale: float,
    kv_scale: torch.Tensor | None,
) -> torch.Tensor:
    """q: [Q, nq, R + r]; latents: [places, R + r]; seen: [Q, places]; kv_scale: [2] -> [Q, nq, R]."""
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    wide = latents.to(compute)
    values, ropes = wide[:, :latent_dim], wide[:, latent_dim:]
    if kv_scale is not None:
        values, ropes = values * kv_scale[0], ropes * kv_scale[1]
    scores = torch.einsum("qhd,nd->hqn", q.to(compute), torch.cat((values, ropes), dim=1)) * scale
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
    return torch.einsum("hqn,nd->qhd", weights, values)


def write_latents_ref(
    latent: torch.Tensor,
    slots: torch.Tensor,
    places: torch.Tensor,
    latents: torch.Tensor,
    latent_dim: int,
    kv_scale: torch.Tensor | None,
) -> None:
    """As ``write_latents``."""
    wide = latent.to(torch.float64 if latent.dtype == torch.float64 else torch.float32)
    broken = ~wide.isfinite().all(dim=1, keepdim=True)  # [T, 1]
    values, ropes = wide[:, :latent_dim], wide[:, latent_dim:]
    if kv_scale is not None:
        values, ropes = values / kv_scale[0], ropes / kv_scale[1]
    row = torch.cat((values.masked_fill(broken, 0.0), ropes.masked_fill(broken, math.nan)), dim=1)
    if latents.dtype == torch.float8_e4m3fn:
        row = row.clamp(-448, 448)
    own = slots > 0
    latents[places[own]] = row[own].to(latents.dtype)

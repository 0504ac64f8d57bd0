"""What stands between the products of a layer with latent attention and the attention itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from sgl_kernel._dispatch import device_info, use_kernel
from sgl_kernel.attention.mla.reference import write_latents_ref
from sgl_kernel.launch import Launch, compute_type, next_power_of_2
from sgl_kernel.linear.ops import InputNorm
from sgl_kernel.rope.ops import RopeTables, TokenRows

MAX_PRODUCT_TOKENS = 32
"""Up to so many tokens the products of heads are bound by reading the weights: kernels of ours do them."""


@dataclass(frozen=True, slots=True)
class NewLatents:
    """What a layer's first product gives of T tokens, and where the cache keeps what is made of it."""

    down: (
        torch.Tensor
    )  # [T, R + r]: the latent before its norm, the key before it is turned; rows may lie apart
    norm: InputNorm
    latents: torch.Tensor  # [places, R + r], contiguous, one layer of the cache
    places: torch.Tensor | None = None  # [T] int64
    page_table: torch.Tensor | None = None  # [slots, max_pages] int32, where there are no ``places``
    page_size: int = 1
    kv_scale: torch.Tensor | None = None  # [2] float32, as in ``latent_attention``
    pad_slot: int = 0  # writes nothing


def prepare_latents(
    q: torch.Tensor | None,
    q_out: torch.Tensor | None,
    new: NewLatents | None,
    tables: RopeTables,
    rows: TokenRows,
    *,
    interleaved: bool,
    pdl: bool = False,
) -> None:
    """Turn the queries, norm and turn what is new and write it to the cache: whichever of it there is.

    q: [T, nq, n + r], heads contiguous; q_out: [T, nq, …], the last r numbers of its heads become q's last
    ones, turned; it may be q. tables: [positions, r]. interleaved: pairs to be turned lie side by side;
    turned ones lie r / 2 apart. Tokens are ``rows.root`` + 0, 1, … of their row. Rounding is that of a norm
    and a rope of their own; a token with a number that is not finite is written as ``write_latents`` does.
    """
    num_tokens = 0 if q is None else q.shape[0]
    num_tokens = num_tokens if new is None else new.down.shape[0]
    if num_tokens == 0:
        return
    if use_kernel(tables.cos):
        prepare_launch(q, q_out, new, tables, rows, interleaved=interleaved, pdl=pdl).run()
    else:
        prepare_ref(q, q_out, new, tables, rows, interleaved)


def absorb_queries(
    q: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    new: NewLatents | None,
    tables: RopeTables,
    rows: TokenRows,
    *,
    interleaved: bool,
    pdl: bool = False,
) -> torch.Tensor:
    """``prepare_latents``, and the queries taken to the latents: out [T, nq, R + r].

    q: [T, nq, n + r]; weight: [nq, …, R], whose first n rows make keys of latents. In one launch for up to
    ``MAX_PRODUCT_TOKENS`` tokens. Returns out.
    """
    key_dim, rank = q.shape[2] - tables.cos.shape[1], weight.shape[2]
    if q.shape[0] == 0:
        return out
    if use_kernel(q) and q.shape[0] <= MAX_PRODUCT_TOKENS:
        absorb_launch(q, weight, out, new, tables, rows, interleaved=interleaved, pdl=pdl).run()
        return out
    prepare_latents(q, out, new, tables, rows, interleaved=interleaved, pdl=pdl)
    by_head = q[..., :key_dim].transpose(0, 1)  # [nq, T, n]
    torch.bmm(by_head, weight[:, :key_dim], out=out[..., :rank].transpose(0, 1))
    return out


def latent_values(sums: torch.Tensor, weight: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
    """sums: [T, nq, R], contiguous; weight: [nq, v, R], heads may lie apart -> [T, nq, v], contiguous."""
    out = sums.new_empty(*sums.shape[:2], weight.shape[1])
    if sums.shape[0] == 0:
        return out
    if use_kernel(sums) and sums.shape[0] <= MAX_PRODUCT_TOKENS:
        values_launch(sums, weight, out, pdl=pdl).run()
    else:
        torch.bmm(sums.transpose(0, 1), weight.transpose(1, 2), out=out.transpose(0, 1))
    return out


def prepare_ref(
    q: torch.Tensor | None,
    q_out: torch.Tensor | None,
    new: NewLatents | None,
    tables: RopeTables,
    rows: TokenRows,
    interleaved: bool,
) -> None:
    rope, num_rows = tables.cos.shape[1], rows.slots.shape[0]
    num_tokens = q.shape[0] if new is None and q is not None else new.down.shape[0] if new is not None else 0
    queries = num_tokens // num_rows
    of_queries = torch.arange(queries, device=rows.root.device)
    positions = (rows.root.to(torch.int64)[:, None] + of_queries).reshape(-1)  # [T]
    cos, sin = tables.cos[positions][:, None], tables.sin[positions][:, None]  # [T, 1, r]

    def turned(x: torch.Tensor) -> torch.Tensor:
        """x: [T, heads, r]"""
        wide = x.to(cos.dtype)
        if interleaved:
            wide = wide.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return torch.addcmul(wide * cos, wide.roll(rope // 2, dims=-1), sin).to(x.dtype)

    if q is not None and q_out is not None:
        q_out[..., -rope:] = turned(q[..., -rope:])
    if new is None:
        return
    latent, key = new.down[:, :-rope], new.down[:, -rope:]
    wide = latent if latent.dtype in (torch.float32, torch.float64) else latent.float()
    normed = F.rms_norm(wide, (wide.shape[1],), None, new.norm.eps).to(latent.dtype) * new.norm.weight
    entry = torch.cat((normed, turned(key[:, None])[:, 0]), dim=1)
    slots = rows.slots.to(torch.int64).repeat_interleave(queries)
    wanted = slots != new.pad_slot
    if rows.counts is not None:
        wanted &= (of_queries < rows.counts[:, None]).reshape(-1)
    places = new.places
    if places is None:
        assert new.page_table is not None
        pages = new.page_table[slots, positions // new.page_size].to(torch.int64)
        places = pages * new.page_size + positions % new.page_size
    rank = new.down.shape[1] - rope
    write_latents_ref(entry, wanted.to(torch.int64), places, new.latents, rank, new.kv_scale)


HEADS_AT_ONCE = 8


def _arguments(
    q: torch.Tensor | None,
    q_out: torch.Tensor | None,
    new: NewLatents | None,
    tables: RopeTables,
    rows: TokenRows,
    interleaved: bool,
) -> tuple[tuple[torch.Tensor, ...], tuple[float | int, ...], dict[str, object], int]:
    """Of ``prepare_kernel``: tensors but q and q_out, strides and numbers, constants, programs."""
    given = q if q is not None else new.down if new is not None else None
    assert given is not None and (q is None) == (q_out is None)
    num_tokens, rope = given.shape[0], tables.cos.shape[1]
    num_heads = 0 if q is None else q.shape[1]
    source = NewLatents(tables.cos, InputNorm(tables.cos, 0.0), given, rows.slots) if new is None else new
    down, latents = source.down, source.latents
    assert down.stride(1) == 1 and tables.cos.is_contiguous() and tables.sin.is_contiguous() and rope % 2 == 0
    if new is not None:
        assert latents.is_contiguous() and latents.shape[1] == down.shape[1]
        assert (new.places is None) != (new.page_table is None), "one way to find a place"
    for of_heads in (q, q_out):
        assert of_heads is None or of_heads.stride(2) == 1 and of_heads.stride(1) == of_heads.shape[2]
    table = rows.slots[:, None] if source.page_table is None else source.page_table
    tensors = (
        down, source.norm.weight, latents, tables.cos if source.kv_scale is None else source.kv_scale,
        tables.cos, tables.sin, rows.slots, rows.root, rows.slots if rows.counts is None else rows.counts,
        table, rows.slots if source.places is None else source.places,
    )  # fmt: skip
    numbers = (down.stride(0), table.stride(0), source.pad_slot, source.norm.eps)
    rank = rope if new is None else down.shape[1] - rope
    q_blocks = -(-num_heads // HEADS_AT_ONCE)
    constants: dict[str, object] = {
        "QUERIES": num_tokens // rows.slots.shape[0],
        "NQ": num_heads,
        "Q_BLOCKS": q_blocks,
        "HEADS": HEADS_AT_ONCE,
        "Q_DIM": 0 if q is None else q.shape[2],
        "OUT_DIM": 0 if q_out is None else q_out.shape[2],
        "R": rank,
        "ROPE": rope,
        "BLOCK": next_power_of_2(rank),
        "HALF": next_power_of_2(rope // 2),
        "INTERLEAVED": interleaved,
        "PAGE_SIZE": source.page_size,
        "PLACES": source.places is not None,
        "HAS_COUNTS": rows.counts is not None,
        "SCALED": source.kv_scale is not None,
        "FP8": latents.dtype == torch.float8_e4m3fn,
    }
    assert num_tokens % rows.slots.shape[0] == 0
    return tensors, numbers, constants, num_tokens * (q_blocks + (new is not None))


def prepare_launch(
    q: torch.Tensor | None,
    q_out: torch.Tensor | None,
    new: NewLatents | None,
    tables: RopeTables,
    rows: TokenRows,
    *,
    interleaved: bool,
    pdl: bool,
) -> Launch:
    from sgl_kernel.attention.mla.preparing.kernels import prepare_kernel

    tensors, numbers, constants, programs = _arguments(q, q_out, new, tables, rows, interleaved)
    queries, turned = tensors[0] if q is None else q, tensors[0] if q_out is None else q_out
    num_tokens = queries.shape[0]
    pdl = pdl and device_info(tables.cos.device).has_pdl
    return Launch(
        prepare_kernel,
        (programs,),
        (queries, turned, *tensors, num_tokens, queries.stride(0), turned.stride(0), *numbers),
        {**constants, "PDL": pdl},
        num_warps=2,
        pdl=pdl,
    )


def absorb_launch(
    q: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    new: NewLatents | None,
    tables: RopeTables,
    rows: TokenRows,
    *,
    interleaved: bool,
    pdl: bool,
) -> Launch:
    from sgl_kernel.attention.mla.preparing.kernels import absorb_kernel

    tensors, numbers, constants, programs = _arguments(q, out, new, tables, rows, interleaved)
    num_tokens, key_dim, rank = q.shape[0], q.shape[2] - tables.cos.shape[1], weight.shape[2]
    assert weight.stride()[1:] == (rank, 1) and out.shape[2] == rank + tables.cos.shape[1]
    assert new is None or new.down.shape[1] == out.shape[2]
    shape = _product_shape(num_tokens, key_dim, rank)
    pdl = pdl and device_info(q.device).has_pdl
    return Launch(
        absorb_kernel,
        (q.shape[1] * -(-rank // shape["BN"]) + programs,),
        (q, weight, out, *tensors, num_tokens, q.stride(0), weight.stride(0), out.stride(0), *numbers),
        {**constants, "K": key_dim, "R": rank, **shape, "CT": compute_type(q.dtype), "PDL": pdl},
        num_warps=4,
        pdl=pdl,
    )


def values_launch(sums: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, pdl: bool) -> Launch:
    from sgl_kernel.attention.mla.preparing.kernels import head_product_kernel

    num_tokens, num_heads, rank = sums.shape
    width = weight.shape[1]
    assert sums.is_contiguous() and out.is_contiguous() and weight.stride(2) == 1
    shape = _product_shape(num_tokens, rank, width)
    pdl = pdl and device_info(sums.device).has_pdl
    return Launch(
        head_product_kernel,
        (num_heads * -(-width // shape["BN"]),),
        (
            sums, weight, out, num_tokens, sums.stride(0), sums.stride(1), weight.stride(0), 1,
            weight.stride(1), out.stride(0), out.stride(1),
        ),
        {"K": rank, "N": width, **shape, "CT": compute_type(sums.dtype), "PDL": pdl},
        num_warps=4,
        pdl=pdl,
    )  # fmt: skip


def _product_shape(num_tokens: int, k: int, n: int) -> dict[str, int]:
    """Not measured. Narrow tiles: eight heads alone shall keep a GPU's SMs busy."""
    assert num_tokens <= MAX_PRODUCT_TOKENS
    return {
        "BM": 16 if num_tokens <= 16 else 32,
        "BN": min(32, max(16, next_power_of_2(n))),
        "BK": min(128, max(16, next_power_of_2(k))),
    }

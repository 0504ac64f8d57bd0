"""Write keys and values of new tokens into a pool."""

from __future__ import annotations

import math

import torch

from sgl_kernel._dispatch import use_kernel
from sgl_kernel.launch import Launch


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    kv: torch.Tensor,
    places: torch.Tensor,
    kv_scale: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """kv[places] = k and v, in the pool's type.

    k, v: [T, nkv, d], heads contiguous; kv: [places, nkv, 2 (k, v), d], contiguous; places: [T] int64;
    kv_scale: [nkv, 2] float32, by which k and v are divided.

    A head whose value is not finite gets a value of 0 and a key of NaN: whoever sees the place has a
    score of NaN as before, and whoever must not see it masks the key, which masks a value never can.
    """
    if use_kernel(kv):
        store_launch(k, v, kv, places, kv_scale, pdl).run()
    else:
        store_kv_ref(k, v, kv, places, kv_scale)


def store_kv_ref(
    k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, places: torch.Tensor, kv_scale: torch.Tensor | None
) -> None:
    if kv_scale is not None:
        k, v = k.float() / kv_scale[:, :1], v.float() / kv_scale[:, 1:]
    broken = ~v.isfinite().all(dim=2, keepdim=True)  # [T, nkv, 1]
    both = torch.stack((k.masked_fill(broken, math.nan), v.masked_fill(broken, 0)), dim=2)
    if kv.dtype == torch.float8_e4m3fn:
        both = both.float().clamp(-448, 448)
    kv[places] = both.to(kv.dtype)


def store_launch(
    k: torch.Tensor,
    v: torch.Tensor,
    kv: torch.Tensor,
    places: torch.Tensor,
    kv_scale: torch.Tensor | None,
    pdl: bool,
) -> Launch:
    from sgl_kernel.attention.store import kernels

    num_tokens, num_heads, head_dim = k.shape
    assert k.stride()[1:] == v.stride()[1:] == (head_dim, 1) and kv.is_contiguous()
    return Launch(
        kernels.store_kernel,
        (num_tokens,),
        (k, v, kv, places, k if kv_scale is None else kv_scale, k.stride(0), v.stride(0)),
        {
            "NKV": num_heads,
            "D": head_dim,
            "HEADS": 1 << (num_heads - 1).bit_length(),
            "BD": 1 << (head_dim - 1).bit_length(),
            "SCALED": kv_scale is not None,
            "FP8": kv.dtype == torch.float8_e4m3fn,
            "PDL": pdl,
        },
        num_warps=4 if num_heads * head_dim >= 1024 else 1,
        pdl=pdl,
    )

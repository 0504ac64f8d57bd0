"""FlashInfer's paged prefill wrapper in torch, from the very arguments the real one gets."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch


class BatchPrefillWithPagedKVCacheWrapper:
    made: list[BatchPrefillWithPagedKVCacheWrapper] = []
    fails = ""  # what ``plan`` raises

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str) -> None:
        assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "NHD"
        self.workspace = float_workspace_buffer
        self.plans: list[dict[str, Any]] = []
        self.made.append(self)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        seq_lens: torch.Tensor,
        max_token_per_sequence: int,
    ) -> None:
        if self.fails:
            raise RuntimeError(self.fails)
        given = dict(locals())
        del given["self"]
        of_host = (qo_indptr, paged_kv_indptr, paged_kv_last_page_len, seq_lens)
        assert all(t.dtype == torch.int32 and t.device.type == "cpu" for t in of_host)
        assert paged_kv_indices.dtype == torch.int32 and len(paged_kv_indices) == paged_kv_indptr[-1]
        lens = (paged_kv_indptr.diff() - 1) * page_size + paged_kv_last_page_len
        assert torch.equal(lens, seq_lens) and max_token_per_sequence == qo_indptr.diff().max()
        assert (paged_kv_last_page_len >= 1).all() and (paged_kv_last_page_len <= page_size).all()
        assert causal and q_data_type == kv_data_type
        self.plans.append(given)

    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor
    ) -> torch.Tensor:
        p = self.plans[-1]
        heads, kv_heads, dim, size = (
            p[name] for name in ("num_qo_heads", "num_kv_heads", "head_dim_qk", "page_size")
        )
        assert q.dtype == p["q_data_type"] and q.shape == (p["qo_indptr"][-1], heads, dim) == out.shape
        assert q.stride()[1:] == (dim, 1) and out.is_contiguous()
        keys, values = paged_kv_cache
        assert (
            keys.shape[1:] == (size, kv_heads, dim) == values.shape[1:] and keys.stride() == values.stride()
        )
        assert keys.stride(-1) == 1 and keys.dtype == p["kv_data_type"]
        for row, length in enumerate(p["seq_lens"].tolist()):
            first, end = p["qo_indptr"][row : row + 2].tolist()
            pages = p["paged_kv_indices"][slice(*p["paged_kv_indptr"][row : row + 2].tolist())].long()
            k, v = (
                t[pages].flatten(0, 1)[:length].repeat_interleave(heads // kv_heads, 1)
                for t in (keys, values)
            )
            wide = torch.promote_types(q.dtype, torch.float32)
            scores = torch.einsum("qhd,khd->hqk", q[first:end].to(wide), k.to(wide)) * p["sm_scale"]
            seen = torch.ones(end - first, length, dtype=torch.bool).tril(length - (end - first))
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            out[first:end] = torch.einsum("hqk,khd->qhd", weights, v.to(wide)).to(out.dtype)
        return out


def fake_flashinfer() -> ModuleType:
    """What ``import flashinfer`` is to give."""
    module = ModuleType("flashinfer")
    wrapper = type("Wrapper", (BatchPrefillWithPagedKVCacheWrapper,), {"made": [], "fails": ""})
    module.BatchPrefillWithPagedKVCacheWrapper = wrapper  # type: ignore[attr-defined]
    return module

"""Rows of different lengths in one step: the nodes that are verified lie one after the other."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sgl_kernel._dispatch import device_info, use_kernel
from sgl_kernel.launch import Launch, next_power_of_2


@dataclass(frozen=True, slots=True)
class QueryLens:
    """How many nodes of each row are verified."""

    of_rows: torch.Tensor  # [R] int64, 1 … N
    total: int  # T, their sum


@dataclass(frozen=True, slots=True)
class Layout:
    """T tokens of R rows with at most N nodes each: the first ones of each row's chain."""

    query_start: torch.Tensor  # [R + 1] int64: the first token of each row, then T
    lines: torch.Tensor  # [T] int64: the node that a token is, of all R * N
    ids: torch.Tensor  # [T] int64: its own id
    positions: torch.Tensor  # [T] int64
    token_of: torch.Tensor  # [R, N] int64: a node's token; of a node that is not verified the row's last one

    @staticmethod
    def make(num_rows: int, num_nodes: int, num_tokens: int, device: torch.device | str) -> Layout:
        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int64, device=device)

        tokens = (empty(num_tokens), empty(num_tokens), empty(num_tokens))
        return Layout(empty(num_rows + 1), *tokens, empty(num_rows, num_nodes))


def lay_out(
    tokens: torch.Tensor,
    root: torch.Tensor,
    query_lens: torch.Tensor,
    out: Layout,
    *,
    pdl: bool = False,
) -> Layout:
    """Fill ``out``. tokens: [R, N] int64; root: [R] int64, the position of a row's first node;
    query_lens: [R] int64, 1 … N nodes that are verified. They must add up to T: the device does not check it.
    """
    if use_kernel(tokens):
        lay_out_launch(tokens, root, query_lens, out, pdl=pdl).run()
    else:
        lay_out_ref(tokens, root, query_lens, out)
    return out


def lay_out_ref(tokens: torch.Tensor, root: torch.Tensor, query_lens: torch.Tensor, out: Layout) -> None:
    node = torch.arange(tokens.shape[1], device=tokens.device)
    asked = node < query_lens[:, None]  # [R, N]
    out.query_start[0] = 0
    out.query_start[1:] = query_lens.cumsum(0)
    out.lines.copy_(asked.flatten().nonzero()[:, 0])
    out.ids.copy_(tokens[asked])
    out.positions.copy_((root[:, None] + node)[asked])
    out.token_of.copy_(out.query_start[:-1, None] + torch.minimum(node, query_lens[:, None] - 1))


def lay_out_launch(
    tokens: torch.Tensor, root: torch.Tensor, query_lens: torch.Tensor, out: Layout, *, pdl: bool
) -> Launch:
    from sgl_kernel.speculation.ragged.kernels import lay_out_kernel

    num_rows, num_nodes = tokens.shape
    assert tokens.is_contiguous() and out.token_of.shape == tokens.shape
    pdl = pdl and device_info(tokens.device).has_pdl
    return Launch(
        lay_out_kernel,
        (num_rows,),
        (
            tokens,
            root,
            query_lens,
            out.query_start,
            out.lines,
            out.ids,
            out.positions,
            out.token_of,
            num_rows,
        ),
        {
            "NODES": num_nodes,
            "PADDED": next_power_of_2(num_nodes),
            "ROWS": max(16, next_power_of_2(num_rows)),
            "PDL": pdl,
        },
        num_warps=1 if num_rows <= 128 else 4,
        pdl=pdl,
    )

"""Bring an accepted path's KV to the front: tree nodes were stored in the order of their numbers."""

from __future__ import annotations

import torch

from sgl_kernel._dispatch import device_info, use_kernel
from sgl_kernel.launch import Launch, next_power_of_2


def move_path(
    kv: torch.Tensor,
    path: torch.Tensor,
    counts: torch.Tensor,
    slots: torch.Tensor,
    root: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    *,
    pad_slot: int = 0,
    pdl: bool = False,
) -> None:
    """Copy position ``root + path[r, c]`` of a row to ``root + c``, in all layers, for c < counts[r].

    kv: [layers, places, …], what follows a place is copied whole (any type; a latent or scales too);
    path: [R, C] int64 nodes; counts: [R] int64; slots, root: [R]; page_table: [slots, max_pages] int32.
    Everything is read before it is written, so paths may overlap their targets. The pad slot moves
    nothing.
    """
    if path.shape[0] == 0 or path.shape[1] == 1:
        return
    if use_kernel(kv):
        move_launch(kv, path, counts, slots, root, page_table, page_size, pad_slot, pdl=pdl).run()
    else:
        move_path_ref(kv, path, counts, slots, root, page_table, page_size, pad_slot)


def move_path_ref(
    kv: torch.Tensor,
    path: torch.Tensor,
    counts: torch.Tensor,
    slots: torch.Tensor,
    root: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    pad_slot: int,
) -> None:
    column = torch.arange(path.shape[1], device=path.device)
    slots, root = slots.to(torch.int64)[:, None], root.to(torch.int64)[:, None]
    wanted = (column < counts[:, None]) & (slots != pad_slot)

    def places(position: torch.Tensor) -> torch.Tensor:
        pages = page_table[slots, position // page_size].to(torch.int64)
        return (pages * page_size + position % page_size)[wanted]

    kv[:, places(root + column)] = kv[:, places(root + path)]


def move_launch(
    kv: torch.Tensor,
    path: torch.Tensor,
    counts: torch.Tensor,
    slots: torch.Tensor,
    root: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    pad_slot: int,
    *,
    pdl: bool,
) -> Launch:
    from sgl_kernel.speculation.kernels import move_path_kernel

    num_rows, num_columns = path.shape
    size = kv[0, 0].numel()
    assert kv.is_contiguous() and path.is_contiguous()
    padded = next_power_of_2(num_columns)
    block = min(next_power_of_2(size), max(128, 4096 // padded))
    pdl = pdl and device_info(kv.device).has_pdl
    rows = (path, counts, slots, root, page_table)
    return Launch(
        move_path_kernel,
        (num_rows, kv.shape[0], -(-size // block)),
        (kv, *rows, kv.stride(0), page_table.stride(0), pad_slot),
        {
            "SIZE": size,
            "COLUMNS": num_columns,
            "PADDED": padded,
            "PAGE_SIZE": page_size,
            "BLOCK": block,
            "PDL": pdl,
        },
        num_warps=4,
        pdl=pdl,
    )

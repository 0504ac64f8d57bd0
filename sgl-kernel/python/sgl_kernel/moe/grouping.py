"""Where the pairs of many tokens lie by expert: by a sort, as ``routing.kernels`` finds out for few."""

from __future__ import annotations

import torch


def num_blocks(num_pairs: int, num_experts: int, block_m: int) -> int:
    """More than there can be of ``block_m`` pairs of one expert or less."""
    return num_experts + num_pairs // block_m


def sort_pairs(
    experts: torch.Tensor, num_experts: int, block_m: int, blocks: torch.Tensor, order: torch.Tensor
) -> None:
    """experts: [T, k], negative: none. Fills blocks [num_blocks, 3] int32, numbered as COMPACT says in
    ``route_kernel``, and order [T * k] int32. Nothing of it is looked at by the host.
    """
    flat = experts.flatten().long()
    key, by_expert = torch.where(flat < 0, num_experts, flat).sort(stable=True)
    order.copy_(by_expert)
    place = torch.arange(len(key), device=key.device)
    first = torch.searchsorted(key, torch.arange(num_experts + 1, device=key.device))  # [E + 1]
    before = first[key]  # [T * k] pairs of smaller experts
    nth = place - before
    begins = (nth % block_m == 0) & (key < num_experts)
    # What begins no block goes to a row past the last one.
    at = torch.where(begins, key + before // block_m + nth // block_m, len(blocks))
    count = (first[(key + 1).clamp_(max=num_experts)] - place).clamp_(max=block_m)
    found = torch.full((len(blocks) + 1, 3), -1, dtype=torch.int32, device=key.device)
    found.index_copy_(0, at, torch.stack((key, count, place), dim=1).int())
    blocks.copy_(found[:-1])

"""Ids that a grammar forbids, taken out of the choice."""

from __future__ import annotations

import torch

from sgl_kernel._dispatch import device_info, use_kernel
from sgl_kernel.launch import Launch, next_power_of_2
from sgl_kernel.sampling.rows import NodeRows

_LARGEST = torch.finfo(torch.float32).max
_PROGRAMS = 1024
"""As for rules: few for a line of a large batch, most lines of which have no mask."""


def apply_masks(
    logits: torch.Tensor,
    rows: NodeRows,
    which: torch.Tensor,
    masks: torch.Tensor,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """Change logits [R * N, V] float32 (with the rows' ``lines`` [T, V]) in place.

    which: [R] int32, each row's place in ``masks``, below 0 for a row without one; masks: [G, N, words]
    int32, bit t % 32 of word t // 32 allows id t. What is forbidden gets the lowest float32; what was not
    finite stays as it is, so that ``choose`` can still tell a fault.
    """
    if logits.shape[0] == 0 or masks.shape[0] == 0:
        return logits
    if not use_kernel(logits):
        return apply_masks_ref(logits, rows, which, masks)
    masks_launch(logits, rows, which, masks, pdl=pdl).run()
    return logits


def apply_masks_ref(
    logits: torch.Tensor, rows: NodeRows, which: torch.Tensor, masks: torch.Tensor
) -> torch.Tensor:
    shifts = torch.arange(32, dtype=torch.int32, device=masks.device)
    allowed = ((masks[..., None] >> shifts) & 1).flatten(-2)[..., : logits.shape[1]].bool()  # [G, N, V]
    of_rows = allowed[which.clamp(min=0).to(torch.int64)] | (which < 0)[:, None, None]
    forbidden = ~rows.of_lines(of_rows.flatten(0, 1))
    return logits.masked_fill_(forbidden & logits.isfinite(), -_LARGEST)


def masks_launch(
    logits: torch.Tensor, rows: NodeRows, which: torch.Tensor, masks: torch.Tensor, *, pdl: bool
) -> Launch:
    from sgl_kernel.sampling.masks.kernels import apply_masks_kernel

    num_lines, vocab_size = logits.shape
    assert logits.dtype == torch.float32 and logits.stride(1) == 1 and num_lines == rows.num_lines
    assert masks.is_contiguous() and masks.shape[1] == rows.num_nodes and masks.shape[2] * 32 >= vocab_size
    block = min(2048, next_power_of_2(vocab_size))
    programs = min(-(-vocab_size // block), -(-_PROGRAMS // num_lines))
    pdl = pdl and device_info(logits.device).has_pdl
    return Launch(
        apply_masks_kernel,
        (programs, num_lines),
        (logits, which, masks, rows.lines_or(which), logits.stride(0), vocab_size, masks.shape[2]),
        {"NODES": rows.num_nodes, "LINES": rows.lines is not None, "BLOCK": block, "PDL": pdl},
        num_warps=8,
        pdl=pdl,
    )

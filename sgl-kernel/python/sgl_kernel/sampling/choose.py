"""The argmax of a row's scores: raw logits for a greedy row, logits / T + noise for the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sgl_kernel._dispatch import device_info, use_kernel
from sgl_kernel.launch import Launch, next_power_of_2
from sgl_kernel.sampling.noise import noise_of_bits, random_bits_ref
from sgl_kernel.sampling.rows import NodeRows


@dataclass(frozen=True, slots=True)
class ChoiceBuffers:
    """Scratch and results of one size, made once (a graph keeps their addresses).

    A row's best of every block of the vocabulary goes through ``part_*``.
    """

    tokens: torch.Tensor  # [lines] int64; may be a column of a wider tensor
    faulty: torch.Tensor  # [lines] bool
    part_score: torch.Tensor  # [lines, blocks] float32
    part_column: torch.Tensor  # [lines, blocks] int32
    part_broken: torch.Tensor  # [lines, blocks] int32

    @staticmethod
    def make(num_lines: int, vocab_size: int, device: torch.device | str) -> ChoiceBuffers:
        blocks = -(-vocab_size // block_size(num_lines))

        def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return ChoiceBuffers(
            empty(torch.int64, num_lines),
            empty(torch.bool, num_lines),
            empty(torch.float32, num_lines, blocks),
            empty(torch.int32, num_lines, blocks),
            empty(torch.int32, num_lines, blocks),
        )


def block_size(num_lines: int) -> int:
    """Ids a program takes: few rows are split finely, so that all of the device reads them."""
    return 1024 if num_lines <= 8 else 4096


def choose(
    logits: torch.Tensor,
    rows: NodeRows,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    buffers: ChoiceBuffers,
    *,
    token_ids: torch.Tensor | None = None,
    cutoffs: torch.Tensor | None = None,
    faults: bool = True,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The token that follows each node, and whether its logits were broken: [R, N] int64, [R, N] bool;
    [T] each with the rows' ``lines``.

    logits: [R * N, V] float32, only read; temperature: [slots] float32, 0 for a greedy row; seed:
    [slots] int64; token_ids: [V] int64, the target's id of every draft id (noise is drawn at it, and it
    is what is returned); cutoffs: [R * N] float32, scores below are excluded where T > 0. Equal scores:
    the lowest column wins. A node of which a logit is not finite is faulty and gets token 0; ``faults``
    False (a drafter): nothing is checked, ``buffers.faulty`` is left as it is, NaN never wins.
    """
    shape = (rows.slots.shape[0], rows.num_nodes) if rows.lines is None else (rows.num_lines,)
    if shape[0] and use_kernel(logits):
        for launch in choose_launches(
            logits, rows, temperature, seed, buffers, token_ids, cutoffs, faults, pdl=pdl
        ):
            launch.run()
    elif shape[0]:
        choose_ref(logits, rows, temperature, seed, buffers, token_ids, cutoffs, faults)
    return buffers.tokens.view(shape), buffers.faulty.view(shape)


def choose_ref(
    logits: torch.Tensor,
    rows: NodeRows,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    buffers: ChoiceBuffers,
    token_ids: torch.Tensor | None,
    cutoffs: torch.Tensor | None,
    faults: bool,
) -> None:
    ids = torch.arange(logits.shape[1], device=logits.device) if token_ids is None else token_ids
    heat = rows.of_slots(temperature)[:, None]
    scores = logits / torch.where(heat > 0, heat, 1.0)
    if cutoffs is not None:
        scores = scores.masked_fill(scores < cutoffs[:, None], -torch.inf)
    scores = scores + noise_of_bits(
        random_bits_ref(rows.of_slots(seed), rows.of_lines(rows.index().reshape(-1)), ids)
    )
    scores = torch.where(heat > 0, scores, logits).nan_to_num(nan=-torch.inf, posinf=torch.inf)
    tokens = ids[scores.argmax(dim=-1)]
    if faults:
        torch.any(~logits.isfinite(), dim=-1, out=buffers.faulty)
        tokens = tokens.masked_fill(buffers.faulty, 0)
    buffers.tokens.copy_(tokens)


def choose_launches(
    logits: torch.Tensor,
    rows: NodeRows,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    buffers: ChoiceBuffers,
    token_ids: torch.Tensor | None,
    cutoffs: torch.Tensor | None,
    faults: bool,
    *,
    pdl: bool,
) -> tuple[Launch, Launch]:
    """The best of every block, then the best of the blocks."""
    from sgl_kernel.sampling.kernels import choose_finish_kernel, choose_partial_kernel

    num_lines, vocab_size = logits.shape
    assert logits.dtype == torch.float32 and logits.stride(1) == 1 and num_lines == rows.num_lines
    block, blocks = block_size(num_lines), buffers.part_score.shape[1]
    assert buffers.part_score.shape[0] == num_lines and blocks == -(-vocab_size // block)
    pdl = pdl and device_info(logits.device).has_pdl
    parts = (buffers.part_score, buffers.part_column, buffers.part_broken)
    ids = rows.slots if token_ids is None else token_ids
    depths = rows.slots if rows.depths is None else rows.depths
    cut = temperature if cutoffs is None else cutoffs
    lines = rows.lines_or(rows.slots)
    rowwise = (logits, ids, rows.slots, rows.root, lines, depths, temperature, seed, cut)
    partial = Launch(
        choose_partial_kernel,
        (blocks, num_lines),
        (*rowwise, *parts, logits.stride(0), vocab_size, rows.offset),
        {
            "NODES": rows.num_nodes,
            "DEPTHS": int(rows.kind),
            "LINES": rows.lines is not None,
            "HAS_IDS": token_ids is not None,
            "CUTOFF": cutoffs is not None,
            "BLOCK": block,
            "PDL": pdl,
        },
        num_warps=4 if block == 1024 else 8,
        pdl=pdl,
        fp_fusion=False,
    )
    finish = Launch(
        choose_finish_kernel,
        (num_lines,),
        (*parts, ids, buffers.tokens, buffers.faulty, blocks, buffers.tokens.stride(0)),
        {
            "HAS_IDS": token_ids is not None,
            "FAULTS": faults,
            "PADDED": next_power_of_2(blocks),
            "PDL": pdl,
        },
        num_warps=1,
        pdl=pdl,
    )
    return partial, finish

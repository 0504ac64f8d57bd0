"""Penalties, logit biases and suppressed ids, applied to the rows that ask for them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag

import torch

from sgl_kernel._dispatch import device_info, use_kernel
from sgl_kernel.launch import Launch, next_power_of_2
from sgl_kernel.sampling.rows import Depths, NodeRows

_LARGEST = torch.finfo(torch.float32).max
_PROGRAMS = 1024
"""So many (of 8 warps) an H200 holds at a time. Where no row asks, a step pays for their start alone, so
a line of a large batch has few of them, and a line of a small one as many as it has blocks."""


class Asks(IntFlag):
    """What a slot's request wants done to its logits."""

    PENALTIES = 1
    BIASES = 2
    SUPPRESSION = 4


@dataclass(frozen=True, slots=True)
class RuleStates:
    """Per slot. What a list holds past its number of entries may be any id of the vocabulary."""

    asks: torch.Tensor  # [slots] int32, a sum of ``Asks``
    token_counts: torch.Tensor  # [slots, V] int32: how often each id was put out, the root included
    frequency: torch.Tensor  # [slots] float32
    presence: torch.Tensor  # [slots] float32
    repetition: torch.Tensor  # [slots] float32
    bias_ids: torch.Tensor  # [slots, B] int64
    biases: torch.Tensor  # [slots, B] float32
    num_biases: torch.Tensor  # [slots] int32
    suppressed_ids: torch.Tensor  # [slots, S] int64
    num_suppressed: torch.Tensor  # [slots] int32
    free_from: torch.Tensor  # [slots] int64: index from which they may be chosen


def apply_rules(
    logits: torch.Tensor,
    rows: NodeRows,
    tokens: torch.Tensor,
    states: RuleStates,
    *,
    mask: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Change logits [R * N, V] float32 in place, each node with the history of its own path.
    With the rows' ``lines`` they are [T, V].

    tokens: [R, N] int64, the nodes' own tokens; mask: [R, N, N] bool ancestor-or-self of a tree.
    In this order: frequency and presence subtracted, repetition divides what is positive and multiplies
    what is not (the prompt does not count), biases added, early ids suppressed. What was not finite
    stays as it is, and what was stays finite (suppressed: the lowest float32), so that ``choose`` can
    still tell a fault.
    """
    if logits.shape[0] == 0:
        return logits
    if not use_kernel(logits):
        return apply_rules_ref(logits, rows, tokens, states, mask)
    rules_launch(logits, rows, tokens, states, mask, pdl=pdl).run()
    return logits


def apply_rules_ref(
    logits: torch.Tensor,
    rows: NodeRows,
    tokens: torch.Tensor,
    states: RuleStates,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    asks = rows.of_slots(states.asks)[:, None]
    raw = logits.clone()
    new = torch.where(asks & Asks.PENALTIES > 0, _penalised(raw, rows, tokens, states, mask), raw)
    ids, listed = _lists(rows, states.bias_ids, states.num_biases)
    biases = rows.of_slots(states.biases)
    biased = new.scatter_add(-1, ids, biases.masked_fill(~listed, 0))
    new = torch.where(asks & Asks.BIASES > 0, biased, new).clamp(-_LARGEST, _LARGEST)
    early = rows.of_lines(rows.index().reshape(-1)) < rows.of_slots(states.free_from)
    ids, listed = _lists(rows, states.suppressed_ids, states.num_suppressed)
    silent = torch.zeros_like(new).scatter_add(-1, ids, listed.to(new.dtype)) > 0
    silent &= (asks & Asks.SUPPRESSION > 0) & early[:, None]
    new = new.masked_fill(silent, -_LARGEST)
    return logits.copy_(torch.where(raw.isfinite() & (asks > 0), new, raw))


def _lists(rows: NodeRows, ids: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists of slots as those of lines: the ids [lines, K], and which of them count [lines, K] bool."""
    place = torch.arange(ids.shape[1], device=ids.device)
    return rows.of_slots(ids), place < rows.of_slots(count)[:, None]


def _penalised(
    raw: torch.Tensor, rows: NodeRows, tokens: torch.Tensor, states: RuleStates, mask: torch.Tensor | None
) -> torch.Tensor:
    num_nodes = rows.num_nodes
    counts = states.token_counts[rows.slots.to(torch.int64)][:, None].repeat(1, num_nodes, 1)
    on_path = mask
    if on_path is None:
        on_path = torch.ones(num_nodes, num_nodes, dtype=torch.bool, device=raw.device).tril_()
    on_path = on_path.expand(tokens.shape[0], -1, -1).clone()
    on_path[:, :, 0] = False  # the root is among the counts
    counts.scatter_add_(-1, tokens[:, None].expand(-1, num_nodes, -1), on_path.to(counts.dtype))
    counts = rows.of_lines(counts.flatten(0, 1))
    frequency, presence, repetition = (
        rows.of_slots(t)[:, None] for t in (states.frequency, states.presence, states.repetition)
    )
    new = raw - frequency * counts - presence * (counts > 0)
    scale = torch.where(counts > 0, repetition, 1.0)
    return torch.where(new < 0, new * scale, new / scale)


def rules_launch(
    logits: torch.Tensor,
    rows: NodeRows,
    tokens: torch.Tensor,
    states: RuleStates,
    mask: torch.Tensor | None,
    *,
    pdl: bool,
) -> Launch:
    from sgl_kernel.sampling.rules.kernels import apply_rules_kernel

    num_lines, vocab_size = logits.shape
    assert logits.dtype == torch.float32 and logits.stride(1) == 1 and num_lines == rows.num_lines
    assert (mask is None) == (rows.kind is not Depths.TREE) and tokens.is_contiguous()
    block = min(2048, next_power_of_2(vocab_size))
    programs = min(-(-vocab_size // block), -(-_PROGRAMS // num_lines))
    pdl = pdl and device_info(logits.device).has_pdl
    depths = rows.slots if rows.depths is None else rows.depths
    paths = (rows.lines_or(rows.slots), depths, tokens, tokens if mask is None else mask)
    states_args = (
        states.asks, states.token_counts, states.frequency, states.presence, states.repetition,
        states.bias_ids, states.biases, states.num_biases,
        states.suppressed_ids, states.num_suppressed, states.free_from,
    )  # fmt: skip
    sizes = (logits.stride(0), vocab_size, states.bias_ids.shape[1], states.suppressed_ids.shape[1])
    return Launch(
        apply_rules_kernel,
        (programs, num_lines),
        (logits, rows.slots, rows.root, *paths, *states_args, *sizes),
        {
            "NODES": rows.num_nodes,
            "DEPTHS": int(rows.kind),
            "MASK": mask is not None,
            "LINES": rows.lines is not None,
            "BLOCK": block,
            "PDL": pdl,
        },
        num_warps=8,
        pdl=pdl,
        fp_fusion=False,
    )


def count_outputs(
    states: RuleStates,
    slots: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
    *,
    pdl: bool = False,
) -> None:
    """Take note of what rows put out, where their slots ask for penalties.

    slots: [R]; tokens: [R, C] int64, columns adjacent; counts: [R], how many of a row's were put out.
    """
    if slots.shape[0] == 0:
        return
    if use_kernel(tokens):
        count_launch(states, slots, tokens, counts, pdl=pdl).run()
    else:
        count_outputs_ref(states, slots, tokens, counts)


def count_outputs_ref(
    states: RuleStates, slots: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor
) -> None:
    slots = slots.to(torch.int64)
    column = torch.arange(tokens.shape[1], device=tokens.device)
    wanted = (column < counts[:, None]) & ((states.asks[slots] & Asks.PENALTIES) > 0)[:, None]
    flat = torch.where(wanted, slots[:, None] * states.token_counts.shape[1] + tokens, 0)
    states.token_counts.view(-1).scatter_add_(0, flat.reshape(-1), wanted.to(torch.int32).reshape(-1))


def count_launch(
    states: RuleStates, slots: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor, *, pdl: bool
) -> Launch:
    from sgl_kernel.sampling.rules.kernels import count_outputs_kernel

    num_rows, num_columns = tokens.shape
    assert tokens.stride(1) == 1
    pdl = pdl and device_info(tokens.device).has_pdl
    vocab_size = states.token_counts.shape[1]
    return Launch(
        count_outputs_kernel,
        (num_rows,),
        (states.token_counts, states.asks, slots, tokens, counts, tokens.stride(0), vocab_size),
        {"COLUMNS": num_columns, "PDL": pdl},
        num_warps=1,
        pdl=pdl,
    )

"""Drafts out of a row's own text (prompt lookup), and the texts that they are found in.

Lengths are read on the device, so the same launches serve texts of any length.
"""

from __future__ import annotations

from typing import Final

import torch

from sgl_kernel._dispatch import device_info, use_kernel
from sgl_kernel.launch import Launch, next_power_of_2

MAX_SPLITS: Final = 32
"""Parts of a text that are searched side by side: 4 blocks each of one of 128k tokens."""

BLOCK: Final = 1024  # places a pass


def look_up(
    ids: torch.Tensor,
    slots: torch.Tensor,
    root: torch.Tensor,
    tokens: torch.Tensor,
    longest: int,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """Fill ``tokens`` [R, 1 + k] int64 from column 1 on: what followed the place in the text, before its end,
    whose tokens agree with the latest ones longest (``longest`` at most), and of several the latest.

    ids: [slots, W] int32, texts; a negative id agrees with nothing, and is 0 as a draft. slots: [R].
    root: [R] int64, where the last token of each row's text is; behind that it is guessed to go on as it did
    behind the match, as a loop would.
    """
    if tokens.shape[0] == 0 or tokens.shape[1] == 1:
        return tokens
    if use_kernel(tokens):
        for launch in look_up_launches(ids, slots, root, tokens, longest, pdl=pdl):
            launch.run()
    else:
        look_up_ref(ids, slots, root, tokens, longest)
    return tokens


def note(
    ids: torch.Tensor,
    slots: torch.Tensor,
    root: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
    *,
    pad_slot: int = 0,
    pdl: bool = False,
) -> None:
    """The first ``counts`` [R] int64 of ``tokens`` [R, C] int64 go to ``ids`` behind ``root`` [R] int64."""
    if tokens.shape[0] == 0:
        return
    if use_kernel(tokens):
        note_launch(ids, slots, root, tokens, counts, pad_slot, pdl=pdl).run()
    else:
        note_ref(ids, slots, root, tokens, counts, pad_slot)


def look_up_ref(
    ids: torch.Tensor, slots: torch.Tensor, root: torch.Tensor, tokens: torch.Tensor, longest: int
) -> None:
    """One row after the other, in Python."""
    num_drafts = tokens.shape[1] - 1
    for row, (slot, last) in enumerate(zip(slots.tolist(), root.tolist(), strict=True)):
        text = ids[slot, : last + 1].tolist()
        best, match = -1, last - 1
        for place in range(last):
            agreeing = 0
            while agreeing < min(longest, place + 1) and text[place - agreeing] == text[last - agreeing] >= 0:
                agreeing += 1
            if agreeing >= best:
                best, match = agreeing, place
        followed = [text[match + 1 + i % (last - match)] for i in range(num_drafts)]
        tokens[row, 1:] = torch.tensor(followed).clamp(min=0)


def note_ref(
    ids: torch.Tensor,
    slots: torch.Tensor,
    root: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
    pad_slot: int,
) -> None:
    for row, (slot, at, count) in enumerate(zip(slots.tolist(), root.tolist(), counts.tolist(), strict=True)):
        room = max(0, min(count, ids.shape[1] - at - 1))
        if slot != pad_slot:
            ids[slot, at + 1 : at + 1 + room] = tokens[row, :room].to(ids.dtype)


def look_up_launches(
    ids: torch.Tensor,
    slots: torch.Tensor,
    root: torch.Tensor,
    tokens: torch.Tensor,
    longest: int,
    *,
    pdl: bool,
) -> tuple[Launch, Launch]:
    from sgl_kernel.speculation.lookup.kernels import drafts_kernel, match_kernel

    num_rows, width, num_drafts = tokens.shape[0], ids.shape[1], tokens.shape[1] - 1
    assert ids.is_contiguous() and ids.dtype == torch.int32 and tokens.stride(1) == 1
    splits = min(MAX_SPLITS, next_power_of_2(-(-width // BLOCK)))
    best = torch.empty(num_rows, splits, dtype=torch.int64, device=tokens.device)
    pdl = pdl and device_info(tokens.device).has_pdl
    find = Launch(
        match_kernel,
        (num_rows, splits),
        (ids, slots, root, best, width),
        {"LONGEST": longest, "SPLITS": splits, "BLOCK": BLOCK, "PDL": pdl},
        pdl=pdl,
    )
    columns = {"DRAFTS": num_drafts, "COLUMNS": next_power_of_2(num_drafts)}
    take = Launch(
        drafts_kernel,
        (num_rows,),
        (ids, slots, root, best, tokens, width, tokens.stride(0)),
        {**columns, "SPLITS": splits, "PDL": pdl},
        num_warps=1,
        pdl=pdl,
    )
    return find, take


def note_launch(
    ids: torch.Tensor,
    slots: torch.Tensor,
    root: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
    pad_slot: int,
    *,
    pdl: bool,
) -> Launch:
    from sgl_kernel.speculation.lookup.kernels import note_kernel

    num_rows, num_columns = tokens.shape
    assert ids.is_contiguous() and ids.dtype == torch.int32 and tokens.stride(1) == 1
    pdl = pdl and device_info(tokens.device).has_pdl
    return Launch(
        note_kernel,
        (num_rows,),
        (ids, slots, root, tokens, counts, ids.shape[1], tokens.stride(0), pad_slot),
        {"COLUMNS": num_columns, "BLOCK": next_power_of_2(num_columns), "PDL": pdl},
        num_warps=1,
        pdl=pdl,
    )

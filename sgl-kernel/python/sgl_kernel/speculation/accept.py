"""Which drafts the target's own choices confirm, and the state that the step leaves behind."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sgl_kernel._dispatch import device_info, use_kernel
from sgl_kernel.launch import Launch, next_power_of_2


@dataclass(frozen=True, slots=True)
class SlotRows:
    """Per-slot state that ``accept`` reads and advances."""

    seq_len: torch.Tensor  # [slots] int32, L
    next_token: torch.Tensor  # [slots] int64, x_L
    draft_cap: torch.Tensor  # [slots] int64, most drafts taken a step; only read
    pad_slot: int = 0  # keeps its state


@dataclass(frozen=True, slots=True)
class Accepted:
    """R rows, C columns; results of one size, made once."""

    packed: torch.Tensor  # [R, C + 2] int64: tokens, how many are put out, how many are valid
    counts: torch.Tensor  # [R] int64, 0 for the pad slot, else 1 … C
    path: torch.Tensor  # [R, C] int64: the node whose choice is a column's token; past the count the column

    @staticmethod
    def make(num_rows: int, num_columns: int, device: torch.device | str) -> Accepted:
        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int64, device=device)

        return Accepted(empty(num_rows, num_columns + 2), empty(num_rows), empty(num_rows, num_columns))

    @property
    def tokens(self) -> torch.Tensor:
        """[R, C] int64, a view."""
        return self.packed[:, :-2]


def accept(
    tokens: torch.Tensor,
    choice: torch.Tensor,
    faulty: torch.Tensor,
    slots: torch.Tensor,
    root: torch.Tensor,
    state: SlotRows,
    out: Accepted,
    *,
    parents: torch.Tensor | None = None,
    query_lens: torch.Tensor | None = None,
    pdl: bool = False,
) -> Accepted:
    """Walk from the root as long as a child equals the choice, at most ``draft_cap`` drafts deep.

    tokens: [R, N] int64, a node's own token; choice: [R, N] int64, the target's choice after it;
    faulty: [R, N] bool, its logits were not finite; slots: [R]; root: [R], the root's position;
    parents: [R, N] int64 of a tree (-1 for the root, children of a node differ), None for a chain. N = 1
    is a plain step. query_lens: [R] int64, of chains: how many of a row's nodes were verified (``choice`` and
    ``faulty`` of the others count for nothing); None: all. Advances ``seq_len`` to root + count and
    ``next_token`` to the last choice, but not those of the pad slot. Tokens after the first faulty one of a
    row are not valid.
    """
    if tokens.shape[0] == 0:
        return out
    if use_kernel(tokens):
        accept_launch(tokens, choice, faulty, slots, root, state, out, parents, query_lens, pdl=pdl).run()
    else:
        accept_ref(tokens, choice, faulty, slots, root, state, out, parents, query_lens)
    return out


def accept_ref(
    tokens: torch.Tensor,
    choice: torch.Tensor,
    faulty: torch.Tensor,
    slots: torch.Tensor,
    root: torch.Tensor,
    state: SlotRows,
    out: Accepted,
    parents: torch.Tensor | None,
    query_lens: torch.Tensor | None = None,
) -> None:
    """One row after the other, in Python."""
    for row in range(tokens.shape[0]):
        slot = int(slots[row])
        own, chosen, broken = tokens[row].tolist(), choice[row].tolist(), faulty[row].tolist()
        above = list(range(-1, len(own) - 1)) if parents is None else parents[row].tolist()
        cap = int(state.draft_cap[slot]) if slot != state.pad_slot else 0
        if query_lens is not None:
            cap = min(cap, int(query_lens[row]) - 1)
        path = [0]
        while len(path) < out.path.shape[1] and len(path) <= cap:
            children = [n for n, p in enumerate(above) if p == path[-1] and own[n] == chosen[path[-1]]]
            if not children:
                break
            path.append(children[0])
        count = 0 if slot == state.pad_slot else len(path)
        valid = next((i for i, node in enumerate(path) if broken[node]), len(path))
        path += range(len(path), out.path.shape[1])
        out.path[row] = torch.tensor(path)
        out.packed[row] = torch.tensor([chosen[node] for node in path] + [count, min(valid, count)])
        out.counts[row] = count
        if count:
            state.seq_len[slot] = int(root[row]) + count
            state.next_token[slot] = chosen[path[count - 1]]


def accept_launch(
    tokens: torch.Tensor,
    choice: torch.Tensor,
    faulty: torch.Tensor,
    slots: torch.Tensor,
    root: torch.Tensor,
    state: SlotRows,
    out: Accepted,
    parents: torch.Tensor | None,
    query_lens: torch.Tensor | None = None,
    *,
    pdl: bool,
) -> Launch:
    from sgl_kernel.speculation.kernels import accept_kernel

    num_rows, num_nodes = tokens.shape
    num_columns = out.path.shape[1]
    assert all(t.is_contiguous() for t in (tokens, choice, faulty, out.packed, out.path))
    assert num_columns == num_nodes if parents is None else num_columns <= num_nodes
    pdl = pdl and device_info(tokens.device).has_pdl
    rows = (tokens, tokens if parents is None else parents, choice, faulty, slots, root)
    states = (state.draft_cap, slots if query_lens is None else query_lens, state.seq_len, state.next_token)
    return Launch(
        accept_kernel,
        (num_rows,),
        (*rows, *states, out.packed, out.counts, out.path, state.pad_slot),
        {
            "NODES": num_nodes,
            "COLUMNS": num_columns,
            "PADDED": next_power_of_2(num_nodes),
            "TREE": parents is not None,
            "RAGGED": query_lens is not None,
            "PDL": pdl,
        },
        num_warps=1,
        pdl=pdl,
    )


def begin_rows(
    slots: torch.Tensor,
    seq_len: torch.Tensor,
    next_token: torch.Tensor,
    root: torch.Tensor,
    tokens: torch.Tensor,
    *,
    pdl: bool = False,
) -> None:
    """What a step begins with: root[r] = L and tokens[r, 0] = x_L of row r's slot.

    slots: [R]; seq_len: [slots] int32; next_token: [slots] int64; root: [R] int64 and tokens: [R, N]
    int64 are written.
    """
    if slots.shape[0] == 0:
        return
    if use_kernel(slots):
        begin_launch(slots, seq_len, next_token, root, tokens, pdl=pdl).run()
        return
    root.copy_(seq_len[slots.to(torch.int64)])
    tokens[:, 0] = next_token[slots.to(torch.int64)]


def begin_launch(
    slots: torch.Tensor,
    seq_len: torch.Tensor,
    next_token: torch.Tensor,
    root: torch.Tensor,
    tokens: torch.Tensor,
    *,
    pdl: bool,
) -> Launch:
    from sgl_kernel.speculation.kernels import begin_rows_kernel

    num_rows = slots.shape[0]
    pdl = pdl and device_info(slots.device).has_pdl
    return Launch(
        begin_rows_kernel,
        (-(-num_rows // 128),),
        (slots, seq_len, next_token, root, tokens, tokens.stride(0), num_rows),
        {"BLOCK": 128, "PDL": pdl},
        num_warps=4,
        pdl=pdl,
    )

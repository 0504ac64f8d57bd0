"""What the tree ops mean, in plain PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sgl_kernel.sampling.noise import noise_of_bits, random_bits_ref

if TYPE_CHECKING:
    from sgl_kernel.speculation.tree.ops import DraftRows, Frontier, Tree, TreeBuffers


def expand_ref(level: int, logits: torch.Tensor, rows: DraftRows, buffers: TreeBuffers) -> None:
    _make_children(level, logits, rows, buffers)
    out, k, first = buffers.levels[level], buffers.topk, buffers.first(level)
    part = slice(first, buffers.first(level + 1))
    order = buffers.scores[:, part].sort(dim=1, descending=True, stable=True)
    best = order.indices[:, :k]
    out.number.copy_(first + best)
    out.score.copy_(order.values[:, :k])
    out.tokens.copy_(buffers.tokens[:, part].gather(1, best))
    out.parent.copy_(best // k)
    out.positions.copy_((rows.root.to(torch.int64) + level)[:, None])
    out.seen[:, :, k * level :] = torch.eye(k, dtype=torch.bool, device=out.seen.device)
    if level:
        above = buffers.levels[level - 1].seen
        parent = out.parent[:, :, None].expand(-1, -1, above.shape[2])
        out.seen[:, :, : k * level] = above.gather(1, parent)


def _make_children(level: int, logits: torch.Tensor, rows: DraftRows, buffers: TreeBuffers) -> None:
    """The candidates of one level."""
    slots, k = rows.slots.to(torch.int64), buffers.topk
    ranks = logits.view(slots.shape[0], -1, logits.shape[1])
    heat = rows.temperature[slots][:, None, None]
    index = rows.root.to(torch.int64) + level + 1
    drawn = noise_of_bits(random_bits_ref(rows.seed[slots], index, rows.token_ids))[:, None]
    ranks = torch.where(heat > 0, ranks / torch.where(heat > 0, heat, 1.0) + drawn, ranks)
    ranks = ranks.nan_to_num(nan=-torch.inf, posinf=torch.inf)
    log_probs = ranks.log_softmax(dim=-1).clamp(max=0).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    column = ranks.sort(dim=-1, descending=True, stable=True).indices[..., :k]  # [R, nodes, k]
    step = log_probs.gather(2, column)
    above: Frontier | None = buffers.levels[level - 1] if level else None
    score = step if above is None else step + above.score[:, :, None]
    first = buffers.first(level)
    part = slice(first, first + step[0].numel())
    buffers.scores[:, part], buffers.tokens[:, part] = score.flatten(1), rows.token_ids[column].flatten(1)
    buffers.parents[:, part] = -1 if above is None else above.number.repeat_interleave(k, 1)


def finish_ref(
    logits: torch.Tensor, rows: DraftRows, buffers: TreeBuffers, root_tokens: torch.Tensor, out: Tree
) -> None:
    _make_children(buffers.num_levels - 1, logits, rows, buffers)
    num_nodes, k, count = out.tokens.shape[1], buffers.topk, buffers.scores.shape[1]
    for row in range(root_tokens.shape[0]):
        scores = buffers.scores[row].tolist()
        kept = sorted(sorted(range(count), key=lambda c: (-scores[c], c))[: num_nodes - 1])
        place = {c: node for node, c in enumerate(kept, 1)}
        tokens, parents, depths = [int(root_tokens[row])], [-1], [0]
        for c in kept:
            above = int(buffers.parents[row, c])
            tokens.append(int(buffers.tokens[row, c]))
            parents.append(0 if above < 0 else place[above])
            depths.append(1 if c < k else 2 + (c - k) // k**2)
        out.mask[row] = False
        for node in range(num_nodes):
            ancestor = node
            while ancestor >= 0:
                out.mask[row, node, ancestor] = True
                ancestor = parents[ancestor]
        for target, values in ((out.tokens, tokens), (out.parents, parents), (out.depths, depths)):
            target[row] = torch.tensor(values)

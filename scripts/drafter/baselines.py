"""Two drafters without weights, for comparison: a bigram table and n-gram lookup."""

from __future__ import annotations

import numpy as np
import torch
from generate import Text
from torch import Tensor


def bigram_table(text: Text, vocab: int) -> Tensor:
    """Most frequent generated successor of every token id [vocab], -1 if never seen."""
    device = text.ids.device
    owner = torch.repeat_interleave(torch.arange(len(text.length), device=device), text.length)
    start = torch.cumsum(text.length, 0) - text.length
    local = torch.arange(len(text.ids), device=device) - start[owner]
    generated = (local >= text.prompt_len[owner]).nonzero().flatten()
    pair, count = torch.unique(
        text.ids[generated - 1].long() * vocab + text.ids[generated], return_counts=True
    )
    order = torch.argsort(count, stable=True)
    table = torch.full((vocab,), -1, dtype=torch.int64)
    pair = pair[order].cpu()  # later assignments, of more frequent pairs, win
    table.numpy()[(pair // vocab).numpy()] = (pair % vocab).numpy()
    return table


def bigram_hits(text: Text, table: Tensor, steps: int) -> np.ndarray:
    """bool [total, steps]; given the drafts before were right, draft k is the successor of token i+1+k."""
    ids = text.ids.cpu().long().numpy()
    follows = np.zeros(len(ids) + steps + 2, bool)
    follows[1 : len(ids)] = table.cpu().numpy()[ids[:-1]] == ids[1:]
    return np.stack([follows[2 + k : 2 + k + len(ids)] for k in range(steps)], 1)


def ngram_hits(text: Text, steps: int, longest: int = 4) -> np.ndarray:
    """bool [total, steps]: continue the latest earlier match of the last `longest` to 1 tokens."""
    ids = text.ids.cpu().numpy()
    lengths, prompts = text.length.cpu().numpy(), text.prompt_len.cpu().numpy()
    out = np.zeros((len(ids), steps), bool)
    begin = 0
    for length, prompt_len in zip(lengths.tolist(), prompts.tolist(), strict=True):
        _ngram_one(ids[begin : begin + length].tolist(), prompt_len, out[begin : begin + length], longest)
        begin += length
    return out


def _ngram_one(ids: list[int], prompt_len: int, out: np.ndarray, longest: int) -> None:
    """Fill the rows of one text; `seen[n]` maps an n-gram to the place after its latest occurrence."""
    seen: list[dict[tuple[int, ...], int]] = [{} for _ in range(longest + 1)]
    for last in range(len(ids)):  # the newest known token
        grams = [tuple(ids[last + 1 - n : last + 1]) for n in range(min(longest, last + 1) + 1)]
        source = next((seen[n][grams[n]] for n in range(len(grams) - 1, 0, -1) if grams[n] in seen[n]), None)
        if last >= prompt_len and source is not None:
            known = ids[: last + 1]
            for k in range(min(out.shape[1], len(ids) - 1 - last)):
                known.append(known[source + k])
                out[last - 1, k] = known[-1] == ids[last + 1 + k]
        for n in range(1, len(grams)):
            seen[n][grams[n]] = last + 1

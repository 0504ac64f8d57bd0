"""Accept length of a head on held-out text, greedy and at T = 1 with shared noise, beside two baselines.

    python evaluate.py --gguf MODEL.gguf --text DIR --head DIR --out results.json

Draft step k is fed the true tokens, as it is whenever the drafts before it were accepted; chains are
then walked through the table of hits.  Accept length is tokens / verify steps: the bonus token
counts, the first generated token (made by the prefill) does not.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from baselines import bigram_hits, bigram_table, ngram_hits
from dims import Dims
from drafting import Drafting
from export import load_head
from generate import Text
from head import MAX_STEPS
from noise import gumbel
from packing import Corpus
from prompts import DOMAINS
from target import Target, load_gguf, matmul_f32
from torch import Tensor

DRAFTS = (1, 2, 3, 5)
ROW_LEN = 1024
CHAT = ("chat_template", "chat_free")


def head_hits(drafting: Drafting, text: Text, noisy: bool) -> dict[str, np.ndarray]:
    """name -> bool [total tokens, MAX_STEPS]: does draft k made at row i equal token i + 2 + k?

    Gradients stay on, so that the trainer's compiled pieces serve here too.
    """
    corpus = Corpus(text, drafting.draft_of(), drafting.target.dims.eos)
    empty = torch.zeros(len(text.ids) + 1, MAX_STEPS, dtype=torch.bool, device=text.ids.device)
    tables = {name: empty.clone() for name in (("noise", "argmax") if noisy else ("argmax",))}
    places = corpus.pack(drafting.row_len, None)
    places = np.pad(places, ((0, -len(places) % drafting.rows), (0, 0)), constant_values=corpus.pad_place)
    ids, lm_head = drafting.draft_ids, drafting.lm_head()
    for first in range(0, len(places), drafting.rows):
        batch = corpus.batch(places[first : first + drafting.rows])
        place = batch.place.flatten()
        wanted = corpus.ids[place[batch.rows] + 1]
        seed = text.seed[corpus.owner[place[batch.rows]]]
        index = batch.position.flatten()[batch.rows] + 1
        for step, h in enumerate(drafting.forward(batch).outputs):
            at = batch.rows - 1 - step
            logits = matmul_f32(h.detach()[at], lm_head.t())
            tables["argmax"][place[at], step] = ids[logits.argmax(-1)] == wanted
            if noisy:
                tables["noise"][place[at], step] = ids[noisy_argmax(logits, seed, index, ids)] == wanted
    return {name: table[:-1].cpu().numpy() for name, table in tables.items()}


def noisy_argmax(logits: Tensor, seed: Tensor, index: Tensor, ids: Tensor, part: int = 4096) -> Tensor:
    """argmax of logits [N, draft_vocab] plus the noise of the ids' target ids, some rows at a time."""
    rows = torch.arange(len(logits), device=logits.device).split(part)
    return torch.cat(
        [(logits[r] + gumbel(seed[r, None], index[r, None], ids[None])).argmax(-1) for r in rows]
    )


def walk(
    hits: np.ndarray, prompt_len: int, length: int, drafts: int
) -> tuple[int, int, np.ndarray, np.ndarray]:
    """One sequence: verify steps, tokens, and per draft place how often tried and accepted."""
    tried, accepted = np.zeros(drafts, np.int64), np.zeros(drafts, np.int64)
    committed, steps, tokens = prompt_len, 0, 0
    while committed + 1 < length:
        taken = 0
        while taken < drafts and committed + 1 + taken < length:
            tried[taken] += 1
            if not hits[committed - 1, taken]:
                break
            accepted[taken] += 1
            taken += 1
        steps += 1
        tokens += min(taken + 1, length - 1 - committed)
        committed += taken + 1
    return steps, tokens, tried, accepted


def walk_all(hits: np.ndarray, text: Text) -> dict[str, dict]:
    """Domain (and `chat`, `all`) -> accept lengths for DRAFTS and acceptance by place."""
    length, prompt_len, domain = (getattr(text, f).cpu().numpy() for f in ("length", "prompt_len", "domain"))
    start = np.cumsum(length) - length
    groups = {"all": list(DOMAINS), "chat": list(CHAT)} | {d: [d] for d in DOMAINS}
    texts = list(zip(start, length, prompt_len, strict=True))
    runs = {k: [walk(hits[s : s + n], int(p), int(n), k) for s, n, p in texts] for k in DRAFTS}
    out: dict[str, dict] = {}
    for group, members in groups.items():
        inside = [i for i, d in enumerate(domain) if DOMAINS[d] in members]
        if inside:
            out[group] = _group_entry({k: [run[i] for i in inside] for k, run in runs.items()})
    return out


def _group_entry(runs: dict[int, list[tuple]]) -> dict:
    """Accept lengths of some sequences; acceptance by place is that of the longest chain."""
    entry: dict = {"sequences": len(runs[DRAFTS[-1]])}
    for k, picked in runs.items():
        steps, tokens = (np.array([r[j] for r in picked]) for j in (0, 1))
        entry[f"accept_length_{k}"] = round(float(tokens.sum() / max(1, steps.sum())), 3)
        if k == 3:
            entry["accept_length_3_95"] = _interval(steps, tokens)
    tried, accepted = (sum(r[j] for r in runs[DRAFTS[-1]]) for j in (2, 3))
    entry["by_position"] = [round(float(a / max(1, t)), 4) for a, t in zip(accepted, tried, strict=True)]
    entry["tokens"] = int(tokens.sum())
    return entry


def _interval(steps: np.ndarray, tokens: np.ndarray, draws: int = 1000) -> list[float]:
    """95 % bootstrap interval of the accept length, over sequences."""
    index = np.random.default_rng(0).integers(0, len(steps), (draws, len(steps)))
    lengths = tokens[index].sum(1) / np.maximum(1, steps[index].sum(1))
    return [round(float(x), 3) for x in np.percentile(lengths, [2.5, 97.5])]


def evaluate(drafting: Drafting, text: Text, noisy: bool, bigram: Tensor | None) -> dict[str, dict]:
    """Drafter name -> results of `walk_all`; `bigram` is a table, or None for no bigram row."""
    tables = {f"head_{k}": v for k, v in head_hits(drafting, text, noisy).items()}
    tables["ngram"] = ngram_hits(text, MAX_STEPS)
    if bigram is not None:
        tables["bigram"] = bigram_hits(text, bigram, MAX_STEPS)
    return {name: walk_all(table, text) for name, table in tables.items()}


def summary(groups: dict[str, dict]) -> dict:
    """Accept length with 3 drafts by domain, and acceptance by position over all."""
    lengths = {d: r["accept_length_3"] for d, r in groups.items()}
    return lengths | {"by_position": groups["all"]["by_position"]}


def every(text: Text, stride: int) -> Text:
    """Each `stride`-th sequence."""
    picked = torch.arange(0, len(text.length), stride, device=text.ids.device)
    owner = torch.repeat_interleave(torch.arange(len(text.length), device=text.ids.device), text.length)
    inside = owner % stride == 0
    rest = (getattr(text, f)[picked] for f in ("length", "prompt_len", "temperature", "domain", "seed"))
    return Text(text.ids[inside], text.best[inside], *rest)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True, help="folder written by generate.py")
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--every", type=int, default=1, help="use each n-th sequence only")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    target = Target(load_gguf(args.gguf, Dims(), device, dtype), Dims(), ROW_LEN, compiled=on_gpu)
    head, draft_ids = load_head(args.head, device)
    rows = 32 if on_gpu else 2
    drafting = Drafting(target, head, draft_ids, rows, ROW_LEN, compiled=on_gpu)
    train_text = args.text / "train.pt"  # the bigram table needs it
    bigram = bigram_table(Text.load(train_text, device), Dims().vocab) if train_text.exists() else None
    results = {}
    for name in ("greedy", "t1"):
        text = every(Text.load(args.text / f"{name}.pt", device), args.every)
        results[name] = evaluate(drafting, text, name == "t1", bigram)
        for drafter, groups in results[name].items():
            print(
                name, drafter, {d: r["accept_length_3"] for d, r in groups.items()}, groups["all"], flush=True
            )
    args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

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
from generate import Text
from head import MAX_STEPS
from noise import gumbel
from packing import Corpus
from prompts import DOMAINS
from target import Target, load_gguf, matmul_f32
from torch import Tensor

DRAFTS = (1, 2, 3, 5)
CHAT = ("chat_template", "chat_free")


def head_hits(trainer, text: Text, draft_ids: Tensor, noisy: bool) -> dict[str, np.ndarray]:
    """name -> bool [total tokens, MAX_STEPS]: does draft k made at row i equal token i + 2 + k?

    Gradients stay on, so that the trainer's compiled pieces serve here too.
    """
    vocab = trainer.target.dims.vocab
    inverse = torch.full((vocab,), -1, dtype=torch.int64, device=draft_ids.device)
    corpus = Corpus(text, inverse, trainer.target.dims.eos)
    names = ("noise", "argmax") if noisy else ("argmax",)
    tables = {
        n: torch.zeros(len(text.ids) + 1, MAX_STEPS, dtype=torch.bool, device=draft_ids.device) for n in names
    }
    places = corpus.pack(trainer.recipe.row_len, None)
    rows = trainer.recipe.rows
    places = np.pad(places, ((0, -len(places) % rows), (0, 0)), constant_values=corpus.pad_place)
    cast, lm_head = (
        trainer.head.cast(trainer.dtype),
        trainer.head.weights["lm_head"].detach().to(trainer.dtype),
    )
    for first in range(0, len(places), rows):
        batch = corpus.batch(places[first : first + rows])
        trainer.mask.update(batch.position)
        features, _ = trainer.target.forward(batch.ids, batch.position, trainer.mask)
        outputs = trainer.unroller.run(
            cast, trainer.target.weights.embedding, batch.ids, batch.position, features, trainer.mask
        )
        place = batch.place.flatten()
        wanted = corpus.ids[place[batch.rows] + 1]
        for step, h in enumerate(outputs):
            at = batch.rows - 1 - step
            logits = matmul_f32(h.detach()[at], lm_head.t())
            tables["argmax"][place[at], step] = draft_ids[logits.argmax(-1)] == wanted
            if noisy:
                seed, index = (
                    text.seed[corpus.owner[place[batch.rows]]],
                    batch.position.flatten()[batch.rows] + 1,
                )
                for part in torch.arange(len(at), device=at.device).split(4096):
                    noise = gumbel(seed[part, None], index[part, None], draft_ids[None])
                    pick = draft_ids[(logits[part] + noise).argmax(-1)]
                    tables["noise"][place[at[part]], step] = pick == wanted[part]
    return {name: table[:-1].cpu().numpy() for name, table in tables.items()}


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
    runs = {
        k: [
            walk(hits[s : s + n], int(p), int(n), k)
            for s, n, p in zip(start, length, prompt_len, strict=True)
        ]
        for k in DRAFTS
    }
    out: dict[str, dict] = {}
    for group, members in groups.items():
        inside = [i for i, d in enumerate(domain) if DOMAINS[d] in members]
        if not inside:
            continue
        entry: dict = {"sequences": len(inside)}
        for k in DRAFTS:
            picked = [runs[k][i] for i in inside]
            entry[f"accept_length_{k}"] = round(
                sum(r[1] for r in picked) / max(1, sum(r[0] for r in picked)), 3
            )
        tried, accepted = (sum(r[j] for r in picked) for j in (2, 3))
        entry["by_position"] = [round(float(a / max(1, t)), 4) for a, t in zip(accepted, tried, strict=True)]
        entry["tokens"] = int(sum(r[1] for r in picked))
        out[group] = entry
    return out


def evaluate(
    trainer, text: Text, draft_ids: Tensor, noisy: bool, baselines: Tensor | None
) -> dict[str, dict]:
    """Drafter name -> results of `walk_all`; `baselines` is a bigram table or None."""
    tables = {f"head_{k}": v for k, v in head_hits(trainer, text, draft_ids, noisy).items()}
    if baselines is not None:
        tables["ngram"] = ngram_hits(text, MAX_STEPS)
        tables["bigram"] = bigram_hits(text, baselines, MAX_STEPS)
    return {name: walk_all(table, text) for name, table in tables.items()}


def summary(result: dict[str, dict]) -> dict:
    """Accept length with 3 drafts by domain, and acceptance by position over all."""
    head = result["head_argmax"]
    return {d: r["accept_length_3"] for d, r in head.items()} | {"by_position": head["all"]["by_position"]}


def main() -> None:
    from export import load_head
    from train import Recipe, Trainer

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True, help="folder written by generate.py")
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    recipe = Recipe(0.0)
    target = Target(
        load_gguf(args.gguf, Dims(), device, dtype), Dims(), recipe.row_len, compiled=device == "cuda"
    )
    head, draft_ids = load_head(args.head, device)
    trainer = Trainer(target, head, draft_ids, recipe, compiled=device == "cuda")
    bigram = bigram_table(Text.load(args.text / "train.pt", device), Dims().vocab)
    results = {}
    for name in ("greedy", "t1"):
        text = Text.load(args.text / f"{name}.pt", device)
        results[name] = evaluate(trainer, text, draft_ids, name == "t1", bigram)
        for drafter, groups in results[name].items():
            print(
                name, drafter, {d: r["accept_length_3"] for d, r in groups.items()}, groups["all"], flush=True
            )
    args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

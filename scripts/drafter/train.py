"""Train the draft head on self-generated text by the training-time test.

    python train.py --gguf MODEL.gguf --text DIR --out DIR --seconds 900 [--warm-start HEAD_DIR]

Every batch runs the frozen target again (nothing is cached on disk), unrolls the head 5 steps, and
takes a soft cross-entropy to the target's distribution over the draft vocabulary, plus an overlap
term, with weight 0.8^k at step k.  Places where the target's argmax lies outside the draft
vocabulary, and prompts, carry no loss.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dims import Dims
from drafting import Drafting
from evaluate import head_hits, summary, walk_all
from export import load_head, save_head
from generate import Text
from head import DraftHead
from kernels import soft_cross_entropy
from packing import Batch, Corpus
from target import Target, load_gguf, matmul_f32
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Recipe:
    seconds: float
    lr: float = 2e-3
    final_lr: float = 0.01  # of the peak
    warmup_steps: int = 200
    rows: int = 32  # a batch is [rows, row_len] tokens
    row_len: int = 1024
    step_decay: float = 0.8
    overlap_weight: float = 1.0
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0
    report_every: int = 200
    save_every: float = 90.0  # seconds
    check_every: float = 240.0  # seconds between quick held-out checks


class SoftLoss(torch.autograd.Function):
    """Summed row losses of `hidden[rows] @ lm_head.T` against `prob`.

    Both gradients are made on the way forward, while the logits' gradient lies over the logits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        rows: Tensor,
        lm_head: Tensor,
        cast: Tensor,
        prob: Tensor,
        weight: Tensor,
        overlap: float,
    ) -> tuple[Tensor, Tensor]:
        """hidden [N, hidden]; rows [R] distinct; lm_head float32, `cast` its copy in the computing type."""
        picked = hidden[rows]
        logits = picked @ cast.t()
        loss, best = soft_cross_entropy(logits, prob, weight, overlap)  # logits now hold their gradient
        d_hidden = torch.zeros_like(hidden).index_copy_(0, rows, logits @ cast)
        ctx.save_for_backward(d_hidden, matmul_f32(logits.t(), picked))
        ctx.mark_non_differentiable(best)
        return loss.sum(), best

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_head = ctx.saved_tensors
        return d_hidden * grad.to(d_hidden.dtype), None, d_head * grad, None, None, None, None


class Trainer:
    """Owns the optimiser; makes the loss of a batch and steps on it."""

    def __init__(self, drafting: Drafting, recipe: Recipe):
        self.drafting, self.recipe = drafting, recipe
        self.draft_rows = drafting.target.weights.embedding[drafting.draft_ids]  # [draft_vocab, hidden]
        self.optimizer = torch.optim.AdamW(
            drafting.head.parameters(),
            lr=recipe.lr,
            betas=(0.9, 0.95),
            weight_decay=recipe.weight_decay,
            fused=drafting.draft_ids.is_cuda,
        )

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Scalar loss and the hit rate of every step."""
        forward = self.drafting.forward(batch)
        with torch.no_grad():
            prob = torch.softmax(forward.hidden[batch.rows] @ self.draft_rows.t(), -1)
        weight = (batch.wanted >= 0).float() / max(1, len(batch.rows))
        lm_head, lm_cast = self.drafting.head.weights["lm_head"], self.drafting.lm_head()
        total, hits = torch.zeros((), device=weight.device), []
        for step, h in enumerate(forward.outputs):
            scaled = weight * self.recipe.step_decay**step
            loss, best = SoftLoss.apply(
                h, batch.rows - 1 - step, lm_head, lm_cast, prob, scaled, self.recipe.overlap_weight
            )
            total = total + loss
            hits.append((best == batch.wanted).float().mean())
        return total, torch.stack(hits).detach()

    def update(self, batch: Batch, lr: float) -> tuple[Tensor, Tensor]:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.zero_grad(set_to_none=True)
        loss, hits = self.loss(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.drafting.head.parameters(), self.recipe.clip)
        self.optimizer.step()
        return loss.detach(), hits


def learning_rate(recipe: Recipe, step: int, done: float) -> float:
    """Linear warm-up by steps, then a cosine by the share of time `done`."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    shape = recipe.final_lr + (1 - recipe.final_lr) * cosine
    return recipe.lr * min(1.0, (step + 1) / recipe.warmup_steps) * shape


def batches(corpus: Corpus, recipe: Recipe) -> Iterator[tuple[int, Batch]]:
    """Endless batches, repacked in a new order every pass; yields (pass number, batch)."""
    rng = np.random.default_rng(recipe.seed)

    def pack() -> np.ndarray:
        places = corpus.pack(recipe.row_len, rng)
        rng.shuffle(places)
        return np.tile(places, (-(-recipe.rows // len(places)), 1))  # a toy corpus may fill no batch

    with ThreadPoolExecutor(1) as background:
        coming = background.submit(pack)
        for number in itertools.count(1):
            places, coming = coming.result(), background.submit(pack)
            for i in range(0, len(places) - recipe.rows + 1, recipe.rows):
                yield number, corpus.batch(places[i : i + recipe.rows])


class Log:
    """Means of the last steps, printed and kept as JSON lines."""

    def __init__(self, path: Path | None):
        self.path = path
        self.lines: list[dict] = []
        self.sums: list[Tensor] = []

    def add(self, loss: Tensor, hits: Tensor) -> None:
        self.sums.append(torch.cat([loss[None], hits]))

    def means(self) -> list[float]:
        mean = torch.stack(self.sums).mean(0).tolist() if self.sums else []
        self.sums = []
        return [round(x, 4) for x in mean]

    def write(self, **entry: Any) -> None:
        self.lines.append(entry)
        print(json.dumps(entry), flush=True)
        if self.path:
            self.path.write_text("\n".join(json.dumps(line) for line in self.lines) + "\n")


def train(
    trainer: Trainer,
    corpus: Corpus,
    held_out: Text | None,
    out: Path | None,
    max_steps: int = 1 << 60,
) -> Log:
    """Until the recipe's seconds are over (or `max_steps`)."""
    recipe, drafting = trainer.recipe, trainer.drafting
    log = Log(out / "train_log.jsonl" if out else None)
    begin = time.time()
    next_save, next_check = recipe.save_every, recipe.check_every
    for step, (number, batch) in enumerate(batches(corpus, recipe)):
        spent = time.time() - begin
        if spent >= recipe.seconds or step >= max_steps:
            break
        lr = learning_rate(recipe, step, max(spent / recipe.seconds, step / max_steps))
        log.add(*trainer.update(batch, lr))
        if (step + 1) % recipe.report_every == 0 or step in (0, 20):
            loss, *hits = log.means()
            log.write(
                step=step + 1,
                seconds=round(time.time() - begin, 1),
                epoch=number,
                lr=round(lr, 6),
                loss=loss,
                hits=hits,
                tokens=(step + 1) * recipe.rows * recipe.row_len,
            )
        if out and spent > next_save:
            next_save = spent + recipe.save_every
            save_head(drafting.head, drafting.draft_ids, out)
        if held_out is not None and spent > next_check:
            next_check = spent + recipe.check_every
            table = head_hits(drafting, held_out, noisy=False)["argmax"]
            log.write(seconds=round(time.time() - begin, 1), held_out=summary(walk_all(table, held_out)))
    log.write(step=step, seconds=round(time.time() - begin, 1), finished=True)
    if out:
        save_head(drafting.head, drafting.draft_ids, out)
    return log


def frequent_ids(text: Text, dims: Dims) -> Tensor:
    """The draft vocabulary: ids by frequency in the generated tokens (prompts break ties)."""
    owner = torch.repeat_interleave(torch.arange(len(text.length), device=text.ids.device), text.length)
    start = torch.cumsum(text.length, 0) - text.length
    local = torch.arange(len(text.ids), device=text.ids.device) - start[owner]
    generated = local >= text.prompt_len[owner]
    count = torch.bincount(text.ids[generated], minlength=dims.vocab).double()
    count += 1e-4 * torch.bincount(text.ids, minlength=dims.vocab).double()
    return count.argsort(descending=True, stable=True)[: dims.draft_vocab]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True, help="folder written by generate.py")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--warm-start", type=Path, help="folder of a published head to go on from")
    parser.add_argument("--seconds", type=float, default=900.0)
    parser.add_argument("--lr", type=float, default=Recipe(0.0).lr)
    parser.add_argument("--overlap-weight", type=float, default=Recipe(0.0).overlap_weight)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    torch.manual_seed(args.seed)
    recipe = Recipe(args.seconds, lr=args.lr, overlap_weight=args.overlap_weight, seed=args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    target = Target(load_gguf(args.gguf, Dims(), device, dtype), Dims(), recipe.row_len, compiled=on_gpu)
    text = Text.load(args.text / "train.pt", device)
    if args.warm_start:
        head, draft_ids = load_head(args.warm_start, device)
    else:
        head, draft_ids = DraftHead(Dims()).to(device), frequent_ids(text, Dims())
        head.start_from(target.weights.embedding, target.weights.norm, draft_ids)
    drafting = Drafting(target, head, draft_ids, recipe.rows, recipe.row_len, compiled=on_gpu)
    corpus = Corpus(text, drafting.draft_of(), Dims().eos)
    train(Trainer(drafting, recipe), corpus, Text.load(args.text / "greedy.pt", device), args.out)


if __name__ == "__main__":
    main()

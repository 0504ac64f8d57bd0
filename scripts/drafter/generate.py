"""Self-generated text: the target answers every prompt, with many slots refilled on the device.

    python generate.py --gguf MODEL.gguf --prompts prompts.npz --out text.pt --seconds 180

Prompts are fed through the decode loop itself, one token a step, so the whole step is one CUDA
graph: decode, choose, store, and give a finished slot the next prompt.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from dims import Dims
from kernels import choose, decode_attention
from prompts import DOMAINS
from target import Target, load_gguf, rotate
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Jobs:
    """Prompts to be answered, all on one device."""

    ids: Tensor  # [N, max_len] int64, prompt then zeros
    prompt_len: Tensor  # [N] int64
    temperature: Tensor  # [N] float32
    limit: Tensor  # [N] int64, most tokens, prompt included
    domain: Tensor  # [N] int64

    def select(self, index: Tensor) -> Jobs:
        return Jobs(
            *(getattr(self, f)[index] for f in ("ids", "prompt_len", "temperature", "limit", "domain"))
        )


@dataclass(frozen=True, slots=True)
class Text:
    """Finished text, flat."""

    ids: Tensor  # [total] int32
    best: Tensor  # [total] int32, argmax the target had for this place, whatever was chosen
    length: Tensor  # [N] int64
    prompt_len: Tensor  # [N] int64
    temperature: Tensor  # [N] float32
    domain: Tensor  # [N] int64
    seed: Tensor  # [N] int64, the noise seed of each sequence

    def save(self, path: Path) -> None:
        torch.save({f: getattr(self, f).cpu() for f in self.__dataclass_fields__}, path)

    @staticmethod
    def load(path: Path, device: str) -> Text:
        return Text(**{k: v.to(device) for k, v in torch.load(path).items()})


class Cache:
    """Keys and values of all slots: per layer [slots, kv_heads, max_len, head_dim]."""

    def __init__(self, slots: int, max_len: int, like: Tensor, dims: Dims):
        shape = (slots, dims.kv_heads, max_len, dims.head_dim)
        self.keys = [torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in range(dims.layers)]
        self.values = [torch.zeros_like(k) for k in self.keys]
        self.slot = torch.arange(slots, device=like.device)


def decode(target: Target, cache: Cache, token: Tensor, position: Tensor) -> Tensor:
    """One token per slot: token, position [B] -> final normed hidden [B, hidden]."""
    dims, weights = target.dims, target.weights
    shape = (dims.hidden,)
    cos, sin = target.cos[position][:, None], target.sin[position][:, None]  # [B, 1, D]
    x = weights.embedding[token]
    for w, keys, values in zip(weights.layers, cache.keys, cache.values, strict=True):
        fused = F.linear(F.rms_norm(x, shape, w.norm1, dims.eps), w.qkv).view(len(token), -1, dims.head_dim)
        turned = rotate(fused[:, : dims.heads + dims.kv_heads], cos, sin)
        keys[cache.slot, :, position] = turned[:, dims.heads :]
        values[cache.slot, :, position] = fused[:, dims.heads + dims.kv_heads :]
        o = decode_attention(turned[:, : dims.heads].contiguous(), keys, values, position)
        x = x + F.linear(o.flatten(1), w.out)
        gate, up = F.linear(F.rms_norm(x, shape, w.norm2, dims.eps), w.gate_up).chunk(2, -1)
        x = x + F.linear(F.silu(gate) * up, w.down)
    return F.rms_norm(x, shape, weights.norm, dims.eps)


class Generator:
    """The slots' state and the step.  Row N of every job tensor is a dummy for idle slots."""

    def __init__(self, target: Target, jobs: Jobs, slots: int, seed: int):
        self.target, self.num_jobs = target, len(jobs.prompt_len)
        device, max_len = jobs.ids.device, jobs.ids.shape[1]
        slots = min(slots, self.num_jobs)

        def pad(x: Tensor, value: int) -> Tensor:
            return torch.cat([x, x.new_full((1, *x.shape[1:]), value)])

        self.ids = F.pad(pad(jobs.ids, 1), (0, 1))  # one spare column for idle slots
        self.best = torch.zeros_like(self.ids, dtype=torch.int32)
        self.prompt_len, self.limit = pad(jobs.prompt_len, 1), pad(jobs.limit, max_len)
        self.temperature, self.length = pad(jobs.temperature, 0), torch.zeros_like(pad(jobs.limit, 0))
        self.seed_base = seed * 1_000_003
        self.slot = torch.arange(slots, device=device)
        self.job = self.slot.clone()
        self.position = torch.zeros_like(self.slot)
        self.token = self.ids[self.job, 0].clone()
        self.started = torch.full((), slots, device=device)  # jobs handed out
        self.cache = Cache(slots, max_len, target.weights.embedding, target.dims)

    def step(self) -> None:
        job, index = self.job, self.position + 1
        logits = self.target.logits(decode(self.target, self.cache, self.token, self.position))
        token, best = choose(logits, self.temperature[job], job + self.seed_base, index)
        in_prompt = index < self.prompt_len[job]
        token = torch.where(in_prompt, self.ids[job, index], token)
        self.ids[job, index] = token
        self.best[job, index] = best.int()
        done = (~in_prompt & (token == self.target.dims.eos)) | (index + 1 >= self.limit[job])
        self.length[torch.where(done, job, self.num_jobs)] = index + 1
        fresh = (self.started + torch.cumsum(done.long(), 0) - 1).clamp(max=self.num_jobs)
        self.started.add_(done.long().sum())
        fresh = torch.where(done, fresh, job)
        self.token.copy_(torch.where(done, self.ids[fresh, 0], token))
        self.position.copy_(torch.where(done, 0, index))
        self.job.copy_(fresh)

    def _replay(self) -> Callable[[], None]:
        """The step as a CUDA graph (or itself on a CPU)."""
        if not self.token.is_cuda:
            return self.step
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph.replay

    @torch.no_grad()
    def run(self, seconds: float, label: str) -> None:
        """Until every job is done or the time is up; what is cut keeps the tokens it has."""
        begin, steps, replay = time.time(), 2, self._replay()
        while True:
            replay()
            steps += 1
            if steps % 32 == 0:
                live = int((self.job < self.num_jobs).sum())
                if live == 0 or time.time() - begin > seconds:
                    break
        live_jobs = self.job < self.num_jobs
        self.length[self.job[live_jobs]] = self.position[live_jobs] + 1
        rate = int(self.length[:-1].sum()) / (time.time() - begin)
        print(
            f"{label}: {steps} steps, {time.time() - begin:.1f} s, {rate:.0f} tokens/s, live {live}",
            flush=True,
        )

    def text(self, jobs: Jobs, at_least: int) -> Text:
        """Jobs with at least `at_least` new tokens, flattened."""
        length = self.length[:-1]
        keep = (length >= jobs.prompt_len + at_least).nonzero().flatten()
        inside = torch.arange(self.ids.shape[1], device=length.device) < length[keep, None]
        return Text(
            ids=self.ids[keep][inside].int(),
            best=self.best[keep][inside],
            length=length[keep],
            prompt_len=jobs.prompt_len[keep],
            temperature=jobs.temperature[keep],
            domain=jobs.domain[keep],
            seed=keep + self.seed_base,
        )


def jobs_from_flat(
    ids: np.ndarray, lengths: np.ndarray, domains: np.ndarray, max_len: int, device: str
) -> Jobs:
    """Prompts from `prompts.npz`; temperature and limit are filled in by the caller."""
    table = torch.zeros(len(lengths), max_len, dtype=torch.int64)
    inside = torch.arange(max_len) < torch.from_numpy(lengths.astype(np.int64))[:, None]
    table[inside] = torch.from_numpy(ids.astype(np.int64))
    count = torch.from_numpy(lengths.astype(np.int64)).to(device)
    zeros = torch.zeros(len(lengths), device=device)
    domain = torch.from_numpy(domains.astype(np.int64)).to(device)
    return Jobs(table.to(device), count, zeros, count, domain)


def with_sampling(jobs: Jobs, temperature: Tensor, new_tokens: Tensor) -> Jobs:
    limit = (jobs.prompt_len + new_tokens).clamp(max=jobs.ids.shape[1] - 1)
    return Jobs(jobs.ids, jobs.prompt_len, temperature.float(), limit, jobs.domain)


def own_user_turns(target: Target, data: dict, count: int, slots: int, max_len: int, seed: int) -> Jobs:
    """Prompts that the model writes itself, from the empty user turn, at three temperatures."""
    device = str(target.weights.embedding.device)
    prefix, suffix = (
        torch.from_numpy(data[k].astype(np.int64)).to(device) for k in ("user_prefix", "assistant_prefix")
    )
    lengths = np.full(count, len(prefix))
    jobs = jobs_from_flat(
        np.tile(data["user_prefix"], count),
        lengths,
        np.full(count, DOMAINS.index("model_turns")),
        128,
        device,
    )
    heat = torch.tensor([0.8, 1.0, 1.0, 1.2], device=device)[torch.arange(count, device=device) % 4]
    jobs = with_sampling(jobs, heat, torch.full_like(jobs.prompt_len, 96))
    generator = Generator(target, jobs, slots, seed)
    generator.run(60.0, "own user turns")
    length = generator.length[:-1]
    ids = generator.ids[:-1, :128]
    ended = ids.gather(1, (length - 1).clamp(min=0)[:, None])[:, 0] == target.dims.eos
    keep = (ended & (length > len(prefix) + 3)).nonzero().flatten()
    table = F.pad(ids[keep], (0, max_len - 128))
    at = length[keep] - 1  # the suffix begins where the turn's end mark is
    table[
        torch.arange(len(keep), device=device)[:, None],
        at[:, None] + torch.arange(len(suffix), device=device),
    ] = suffix
    return Jobs(table, at + len(suffix), heat[keep], at, jobs.domain[keep])


def drop_known(jobs: Jobs, known: Jobs) -> Jobs:
    """Jobs whose prompt is not among the held-out ones, each prompt once."""
    width = max(jobs.ids.shape[1], known.ids.shape[1])
    seen = {row.tobytes() for row in F.pad(known.ids, (0, width - known.ids.shape[1])).cpu().numpy()}
    keep = []
    for i, row in enumerate(F.pad(jobs.ids, (0, width - jobs.ids.shape[1])).cpu().numpy()):
        key = row.tobytes()
        if key not in seen:
            seen.add(key)
            keep.append(i)
    return jobs.select(torch.tensor(keep, device=jobs.ids.device))


def concat(first: Jobs, second: Jobs) -> Jobs:
    fields = ("ids", "prompt_len", "temperature", "limit", "domain")
    return Jobs(*(torch.cat([getattr(first, f), getattr(second, f)]) for f in fields))


def training_mix(jobs: Jobs, seed: int) -> Jobs:
    """Shuffle; temperatures 0 / 0.7 / 1 for 45 / 30 / 25 %, no prompt greedy twice; three lengths."""
    rng = torch.Generator().manual_seed(seed)
    jobs = jobs.select(torch.randperm(len(jobs.prompt_len), generator=rng).to(jobs.ids.device))
    draw = torch.rand(len(jobs.prompt_len), generator=rng)
    heat = torch.where(draw < 0.45, 0.0, torch.where(draw < 0.75, 0.7, 1.0))
    seen: set[bytes] = set()
    for i, row in enumerate(jobs.ids[:, :MAX_KEY].cpu().numpy()):
        key = row.tobytes()
        if heat[i] == 0 and key in seen:
            heat[i] = 0.7
        seen.add(key)
    size = torch.tensor([256, 384, 384, 576])[torch.randint(0, 4, (len(draw),), generator=rng)]
    return with_sampling(jobs, heat.to(jobs.ids.device), size.to(jobs.ids.device))


MAX_KEY = 448  # columns that tell prompts apart


def answer(target: Target, jobs: Jobs, slots: int, seconds: float, seed: int, label: str) -> Text:
    generator = Generator(target, jobs, slots, seed)
    generator.run(seconds, label)
    return generator.text(jobs, at_least=4)


def held_out_text(target: Target, jobs: Jobs, temperature: float, new_tokens: int, seed: int) -> Text:
    heat = torch.full_like(jobs.temperature, temperature)
    jobs = with_sampling(jobs, heat, torch.full_like(jobs.prompt_len, new_tokens))
    return answer(target, jobs, len(heat), 120.0, seed, f"held out T={temperature}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for train.pt, greedy.pt and t1.pt")
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--slots", type=int, default=4096)
    parser.add_argument("--own-turns", type=int, default=60000)
    parser.add_argument("--max-len", type=int, default=768)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    target = Target(load_gguf(args.gguf, Dims(), device, dtype), Dims(), args.max_len, compiled=False)
    data = dict(np.load(args.prompts))
    args.out.mkdir(parents=True, exist_ok=True)

    def read(part: str) -> Jobs:
        ids, lengths, domains = (data[f"{part}_{k}"] for k in ("ids", "lengths", "domains"))
        return jobs_from_flat(ids, lengths, domains, args.max_len, device)

    held_out = read("held_out")
    for name, temperature in (("greedy", 0.0), ("t1", 1.0)):
        held_out_text(target, held_out, temperature, 256, args.seed + 7).save(args.out / f"{name}.pt")
    own = own_user_turns(target, data, args.own_turns, args.slots, args.max_len, args.seed + 1)
    jobs = training_mix(concat(read("train"), drop_known(own, held_out)), args.seed)
    print("prompts", len(jobs.prompt_len), "own turns", len(own.prompt_len), flush=True)
    text = answer(target, jobs, args.slots, args.seconds, args.seed, "training text")
    text.save(args.out / "train.pt")
    print("tokens", len(text.ids), "generated", int((text.length - text.prompt_len).sum()), flush=True)


if __name__ == "__main__":
    main()

"""The EAGLE-3 draft head: `fc`, one Llama layer on [embedding, feature], norm, reduced output layer.

Row i sees the embedding of token i+1 and the feature of position i, and predicts token i+2.  Step
k of the training-time test feeds the head's own output back and shifts the tokens by one more; its
queries see the step-0 keys causally and one key, at their own row, of each later step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from attention import PackedMask, attend_lse
from dims import Dims
from target import rms_norm, rotate
from torch import Tensor, nn

MAX_STEPS = 5


class DraftHead(nn.Module):
    """Parameters in float32; the names are those of the published format."""

    def __init__(self, dims: Dims):
        super().__init__()
        self.dims = dims
        h, q, kv, f = dims.hidden, dims.q_size, dims.kv_size, dims.ffn
        shapes = {
            "fc": (h, 3 * h),
            "midlayer.self_attn.q_proj": (q, 2 * h),
            "midlayer.self_attn.k_proj": (kv, 2 * h),
            "midlayer.self_attn.v_proj": (kv, 2 * h),
            "midlayer.self_attn.o_proj": (h, q),
            "midlayer.mlp.gate_proj": (f, h),
            "midlayer.mlp.up_proj": (f, h),
            "midlayer.mlp.down_proj": (h, f),
            "lm_head": (dims.draft_vocab, h),
        }
        norms = (
            "midlayer.input_layernorm",
            "midlayer.hidden_norm",
            "midlayer.post_attention_layernorm",
            "norm",
        )
        self.weights = nn.ParameterDict()
        for name, (rows, cols) in shapes.items():
            bound = cols**-0.5
            self.weights[self.key(name)] = nn.Parameter(torch.empty(rows, cols).uniform_(-bound, bound))
        for name in norms:
            self.weights[self.key(name)] = nn.Parameter(torch.ones(h))

    @staticmethod
    def key(name: str) -> str:
        """ParameterDict keys may hold no dots."""
        return name.replace(".", "/")

    def named(self) -> dict[str, nn.Parameter]:
        """Published name (with `.weight`) -> parameter."""
        return {k.replace("/", ".") + ".weight": v for k, v in self.weights.items()}

    @torch.no_grad()
    def start_from(self, embedding: Tensor, norm: Tensor, draft_ids: Tensor) -> None:
        """Output layer and final norm from the target, the rest stays random."""
        self.weights["lm_head"].copy_(embedding[draft_ids].float())
        self.weights["norm"].copy_(norm.float())

    def cast(self, dtype: torch.dtype) -> CastWeights:
        """Weights in the computing type, once per training step; gradients flow back to float32."""
        w = {name: value.to(dtype) for name, value in self.weights.items() if name != "lm_head"}
        attn, mlp = "midlayer/self_attn/", "midlayer/mlp/"
        return CastWeights(
            fc=w["fc"],
            norms=(w["midlayer/input_layernorm"], w["midlayer/hidden_norm"]),
            qkv=torch.cat([w[attn + "q_proj"], w[attn + "k_proj"], w[attn + "v_proj"]]),
            out=w[attn + "o_proj"],
            post_norm=w["midlayer/post_attention_layernorm"],
            gate_up=torch.cat([w[mlp + "gate_proj"], w[mlp + "up_proj"]]),
            down=w[mlp + "down_proj"],
            final_norm=w["norm"],
        )


@dataclass(frozen=True, slots=True)
class CastWeights:
    fc: Tensor  # [hidden, 3 hidden]
    norms: tuple[Tensor, Tensor]  # of the embedding, of the feature
    qkv: Tensor  # [q + 2 kv, 2 hidden]
    out: Tensor  # [hidden, q]
    post_norm: Tensor
    gate_up: Tensor  # [2 ffn, hidden]
    down: Tensor  # [hidden, ffn]
    final_norm: Tensor


def _project(
    e: Tensor, h: Tensor, norms: tuple, qkv: Tensor, cos: Tensor, sin: Tensor, dims: Dims
) -> tuple[Tensor, Tensor, Tensor]:
    """e, h [B, S, hidden] -> q [B, heads, S, D], k and v [B, kv_heads, S, D]."""
    x = torch.cat([rms_norm(e, norms[0], dims.eps), rms_norm(h, norms[1], dims.eps)], -1)
    fused = F.linear(x, qkv).view(*e.shape[:2], -1, dims.head_dim).transpose(1, 2)
    q, k, v = fused.split([dims.heads, dims.kv_heads, dims.kv_heads], 1)
    return rotate(q, cos, sin), rotate(k, cos, sin), v.contiguous()


def _merge(q: Tensor, o: Tensor, lse: Tensor, keys: tuple, values: tuple, closed: Tensor) -> Tensor:
    """Add the later steps' own keys to attention over the step-0 keys, by their log-sum-exps.

    keys, values: MAX_STEPS-1 tensors [B, kv_heads, S, D]; closed [MAX_STEPS-1] is -inf where unused.
    """
    batch, heads, length, dim = q.shape
    grouped = q.view(batch, -1, heads // keys[0].shape[1], length, dim).float()
    scores = [(grouped * k[:, :, None].float()).sum(-1) * dim**-0.5 + closed[i] for i, k in enumerate(keys)]
    base = lse.view(batch, -1, heads // keys[0].shape[1], length)
    weights = torch.softmax(torch.stack([base, *scores]), 0)  # [MAX_STEPS, B, kv_heads, group, S]
    total = weights[0, ..., None] * o.view(grouped.shape).float()
    for i, v in enumerate(values):
        total = total + weights[i + 1, ..., None] * v[:, :, None].float()
    return total.view(q.shape).to(q.dtype)


def _finish(
    h: Tensor,
    q: Tensor,
    o: Tensor,
    lse: Tensor,
    keys: tuple,
    values: tuple,
    closed: Tensor,
    out: Tensor,
    post_norm: Tensor,
    gate_up: Tensor,
    down: Tensor,
    final_norm: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Rest of the layer: merge, output projection, residual (the raw feature), MLP; output and its norm."""
    mixed = _merge(q, o, lse, keys, values, closed)
    x = h + F.linear(mixed.transpose(1, 2).flatten(2), out)
    gate, up = F.linear(rms_norm(x, post_norm, eps), gate_up).chunk(2, -1)
    x = x + F.linear(F.silu(gate) * up, down)
    return x, rms_norm(x, final_norm, eps)


class Unroller:
    """Runs the steps of the training-time test over packed rows, with fixed shapes for compiling."""

    def __init__(self, dims: Dims, cos: Tensor, sin: Tensor, compiled: bool):
        self.dims, self.cos, self.sin = dims, cos, sin
        wrap: Callable = (lambda f: torch.compile(f, dynamic=False)) if compiled else (lambda f: f)
        self._project, self._finish = wrap(_project), wrap(_finish)
        closed = torch.full((MAX_STEPS, MAX_STEPS - 1), float("-inf"), device=cos.device)
        for step in range(1, MAX_STEPS):
            closed[step, :step] = 0
        self.closed = closed.unbind(0)
        self._blanks: dict[str, list[Tensor]] = {}

    def _fill(self, name: str, used: list[Tensor], like: Tensor) -> tuple[Tensor, ...]:
        """`used` filled up to MAX_STEPS-1 with zeros that look like `like` to the compiler.

        The zeros are distinct tensors and take part in autograd, so that all calls look alike.
        """
        blanks = self._blanks.get(name)
        if blanks is None or blanks[0].shape != like.shape:
            blanks = [torch.zeros_like(like, requires_grad=True) for _ in range(MAX_STEPS - 1)]
            self._blanks[name] = blanks
        for blank in blanks:
            blank.grad = None
        rest = blanks[len(used) :]
        return (*used, *(rest if torch.is_grad_enabled() else [b.detach() for b in rest]))

    def run(
        self,
        w: CastWeights,
        embedding: Tensor,
        ids: Tensor,
        position: Tensor,
        features: Tensor,
        mask: PackedMask,
        steps: int = MAX_STEPS,
    ) -> Iterator[Tensor]:
        """Yields the normed layer output [B * S, hidden] of every step, ready for `lm_head`.

        ids, position [B, S]; features [B, S, 3 hidden].
        """
        h = F.linear(features, w.fc)
        first: tuple[Tensor, Tensor] | None = None
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for step in range(steps):
            e = F.embedding(torch.roll(ids, -1 - step, 1), embedding)
            cos, sin = (t[position + step][:, None] for t in (self.cos, self.sin))
            q, k, v = self._project(e, h, w.norms, w.qkv, cos, sin, self.dims)
            if first is None:
                first = (k, v)
            else:
                keys.append(k)
                values.append(v)
            o, lse = attend_lse(q, *first, mask)
            h, normed = self._finish(
                h,
                q,
                o,
                lse,
                self._fill("k", keys, k),
                self._fill("v", values, v),
                self.closed[step],
                w.out,
                w.post_norm,
                w.gate_up,
                w.down,
                w.final_norm,
                self.dims.eps,
            )
            yield normed.flatten(0, 1)

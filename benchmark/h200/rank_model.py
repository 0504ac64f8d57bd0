"""One rank of a model that is split over several, alone: its weights, its cache, its steps as graphs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import torch

from sgl_kernel.launch import compile_ahead
from sgl_kernel.linear.variants import ChoiceTable
from sgl_kernel.speculation.accept import Accepted
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.collectives import SingleRank
from sglang.srt.distributed.tensor_parallel import TensorParallel
from sglang.srt.layers.kernel_linear import KernelChoices
from sglang.srt.layers.moe.layer import ExpertProducts, MoE
from sglang.srt.managers.executor_build_attention import kernel_attention
from sglang.srt.managers.executor_build_cuda import telling_keys
from sglang.srt.mem_cache.mla_pool import MLAShape
from sglang.srt.model_executor.config import WorkerConfig, max_positions
from sglang.srt.model_executor.decode_step import DecodeStep, Rows
from sglang.srt.model_executor.drafter import DraftTree
from sglang.srt.model_executor.graph_sizes import GraphSizes
from sglang.srt.model_executor.slot_state import SlotState
from sglang.srt.model_executor.step_graphs import CudaCapture, StepGraphs
from sglang.srt.model_executor.step_plan import SpecShape
from sglang.srt.model_executor.tune_linears import tune_linears
from sglang.srt.model_loader.checkpoint import open_source
from sglang.srt.models.decoder import DecoderModel
from sglang.srt.models.registry import build_model
from sglang.srt.sampling.kernel_sampler import KernelSampler

SPEC: Final = SpecShape(num_steps=3, topk=1, num_draft_tokens=4)
SLACK: Final = 16  # places of a request beyond its context
TUNED_LAYERS: Final = 6
EMBEDDING_SCALE: Final = 1e6
AHEAD_CYCLES: Final = 3_000_000  # that the GPU waits, so that a whole step is launched before it begins


class OwnPart(SingleRank):
    """One rank's collectives where there is no other rank: nothing is sent."""

    def __init__(self, size: int, device: str) -> None:
        self.device = device
        self._size = size

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x.expand(self._size, *x.shape)


class RandomDrafts:
    """``DeviceDrafter`` of tokens that are never right; it keeps nothing."""

    def __init__(self, num_layers: int, vocab_size: int) -> None:
        self.aux_layers: tuple[int, ...] = (min(2, num_layers - 1), num_layers // 2, max(num_layers - 3, 0))
        self._vocab_size = vocab_size

    def draft(self, rows: Rows, tokens: torch.Tensor, draft_len: int) -> DraftTree | None:
        for column in range(1, draft_len + 1):
            tokens[:, column] = (tokens[:, column - 1] * 48271 + rows.slots * 7919 + 1) % self._vocab_size
        return None

    def sync(
        self,
        rows: Rows,
        aux: torch.Tensor,
        accepted: Accepted,
        is_tree: bool,
        token_of: torch.Tensor | None = None,
    ) -> None:
        return None


class CountingExperts:
    """``ExpertProducts`` that notes how many experts were hit."""

    def __init__(self, experts: ExpertProducts, hits: list[int]) -> None:
        self._experts, self._hits = experts, hits
        self.weight_bytes = experts.weight_bytes

    def __call__(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        base: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self._hits.append(len(experts[experts >= 0].unique()))
        return self._experts(x, weights, experts, base)


def mixtures(model: DecoderModel) -> list[MoE]:
    mlps = [getattr(layer, "mlp", None) for layer in model.layers]
    return [mlp for mlp in mlps if isinstance(mlp, MoE)]


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes of one rank."""

    total: int
    every_step: int  # all but the embedding and the routed experts
    an_expert: float
    num_moe_layers: int
    num_experts: int

    @staticmethod
    def of(model: DecoderModel) -> Weights:
        moes = mixtures(model)
        experts = sum(moe.experts.weight_bytes for moe in moes)
        moe_config = model.config.moe
        num_experts = 0 if moe_config is None else moe_config.num_experts
        total = model.weight_bytes
        every_step = total - experts - model.embed.weight_bytes
        return Weights(total, every_step, experts / max(1, num_experts * len(moes)), len(moes), num_experts)


class Stack:
    """One rank's model with state, cache and graphs."""

    def __init__(
        self,
        model: DecoderModel,
        batches: Sequence[int],
        contexts: Sequence[int],
        places: int,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.model = model
        self.device = device = model.norm.weight.device
        config = model.config
        self.config = WorkerConfig(
            device, model.norm.weight.dtype, max(batches), places, 1, max(contexts) + SLACK,
            config.vocab_size, SPEC, max(batches), 1, kv_dtype,
        )  # fmt: skip
        self.state = SlotState(self.config)
        self._sampler = KernelSampler(self.config.num_rows, config.vocab_size, device)
        self._sampler.reserve(max(batches) * SPEC.num_draft_tokens)
        self.pool, self._backend = kernel_attention(model, self.config, self.state.page_table)
        self._backend.reserve(max(batches), SPEC.num_draft_tokens)
        for tensor in self.pool.tensors:
            for layer in tensor:
                layer.copy_(torch.randn_like(layer, dtype=self.config.dtype))
        self._order = torch.randperm(places, device=device, dtype=torch.int32).add_(1)
        self.step = self._make_step(model)
        self._graphs: StepGraphs | None = None

    def _make_step(self, model: DecoderModel) -> DecodeStep:
        drafts = RandomDrafts(len(model.layers), model.config.vocab_size)
        return DecodeStep(self.state, self._sampler, model, self.pool, self._backend, SPEC, drafts)

    def set_state(self, batch: int, context: int) -> None:
        """The requests of slots 1 … batch have ``context`` places filled, and another token to go on from."""
        width = context + SLACK
        self.state.page_table[1 : batch + 1, :width] = self._order[: batch * width].view(batch, width)
        self.reset(batch, context)

    def reset(self, batch: int, context: int) -> None:
        self.state.seq_len[1 : batch + 1] = context
        self.state.next_token[1 : batch + 1].random_(0, self.config.vocab_size)

    def prepare(self, batches: Sequence[int], draft_lens: Sequence[int], choices: Path | None) -> None:
        """Compile, time ways to carry out products, capture; on a CPU there is nothing to do."""
        if self.device.type == "cpu":
            return
        sizes = GraphSizes({draft_len: tuple(sorted(batches)) for draft_len in draft_lens}, pad=False)
        self._graphs = StepGraphs(self.step, CudaCapture(self.device), sizes, SPEC, self.device)
        name = torch.cuda.get_device_name(self.device)
        known = choices is not None and choices.is_file()
        table = ChoiceTable.load(choices, name) if choices is not None and known else ChoiceTable(name)
        kernels = KernelChoices(table, self.device)
        for linear in self.model.linears():
            if linear.weight.dtype in (torch.bfloat16, torch.float16):
                linear.use_kernels(kernels)
        x = torch.ones(16, 16, dtype=torch.bfloat16, device=self.device)
        torch.addmm(x[0], x, x)  # the library takes its memory now, which a capture forbids
        self._graphs.compile_ahead(compile_ahead)
        short = copy(self.model)
        short.layers = short.layers[:TUNED_LAYERS]
        step, slots = self._make_step(short), torch.arange(1, max(batches) + 1, device=self.device)
        keys = telling_keys(sizes, SPEC)
        tune_linears(kernels, [partial(step.run, slots[: key.rows], key.draft_len) for key in keys])
        if choices is not None:
            table.save(choices)
        self._graphs.capture_all()

    @torch.inference_mode()
    def time_step(self, batch: int, context: int, draft_len: int, repeats: int) -> list[float]:
        """Milliseconds of each."""
        self.set_state(batch, context)
        return [self._time_one(batch, context, draft_len) for _ in range(repeats + 1)][1:]

    def _time_one(self, batch: int, context: int, draft_len: int) -> float:
        slots_cpu = list(range(1, batch + 1))
        self.reset(batch, context)

        def run() -> torch.Tensor:
            if self._graphs is None:
                return self.step.run(torch.tensor(slots_cpu, device=self.device), draft_len).packed
            done = self._graphs.run(slots_cpu, draft_len)
            assert done is not None
            return done.packed[:batch]

        seconds, packed = timed(run, self.device)
        put_out, valid = packed[:, -2:].unbind(1)
        assert torch.equal(put_out, valid) and bool((valid > 0).all()), "logits that are not finite"
        return seconds * 1e3

    @torch.inference_mode()
    def experts_hit(self, batch: int, context: int, draft_len: int) -> float:
        """Of a layer, the mean over the layers of one eager step."""
        hits: list[int] = []
        self.set_state(batch, context)
        moes = mixtures(self.model)
        kept = [moe.experts for moe in moes]
        for moe in moes:
            moe.experts = CountingExperts(moe.experts, hits)
        try:
            self.step.run(torch.arange(1, batch + 1, device=self.device), draft_len)
        finally:
            for moe, experts in zip(moes, kept, strict=True):
                moe.experts = experts
        return sum(hits) / max(1, len(hits))

    def cache_bytes(self, context: int) -> int:
        """That a request's step reads: latents of all places, or of those an indexer chooses; its keys."""
        shape, mla = self.model.kv_shape, self.model.config.mla
        assert isinstance(shape, MLAShape) and mla is not None
        seen = context if mla.index is None else min(context, mla.index.top_k)
        latents = shape.num_layers * seen * shape.latent_dim * self.config.cache_dtype.itemsize
        return latents + len(shape.index_layers) * context * shape.index_dim * self.config.dtype.itemsize


def copy_bandwidth(device: torch.device, num_bytes: int) -> float:
    """Bytes a second, read and written."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = min(timed(lambda: target.copy_(source), device)[0] for _ in range(8))
    return 2 * num_bytes / best


def timed(run: Callable[[], torch.Tensor], device: torch.device) -> tuple[float, torch.Tensor]:
    """Seconds on the device, and the result."""
    if device.type == "cpu":
        began = time.perf_counter()
        result = run()
        return time.perf_counter() - began, result
    torch.cuda._sleep(AHEAD_CYCLES)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    result = run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3, result


def load(folder: Path, context_len: int, device: torch.device, ranks: int) -> DecoderModel:
    """The first rank's part, of random weights."""
    config = ModelConfig.from_folder(folder, context_len)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    source = open_source(folder, "dummy", dtype, device, config.quant)
    tp = TensorParallel(0, ranks, OwnPart(ranks, device.type))
    model = build_model(config, source, dtype, device, max_positions(context_len, SPEC), tp)
    # Random layers pull all tokens one way, until a deep router sends them all to the same few experts. So
    # what a token brings along outweighs them.
    model.embed.weight.mul_(EMBEDDING_SCALE)
    return model

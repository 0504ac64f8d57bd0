"""The drafter of a CUDA executor, bound to a KV pool: its parts in decode steps and in steps with prompts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang.srt.managers.executor_build_attention import kernel_attention
from sglang.srt.managers.executor_build_drafter import LoadedDrafter, goes_by_tokens
from sglang.srt.mem_cache.pool import KVPool
from sglang.srt.model_executor.config import WorkerConfig
from sglang.srt.model_executor.decode_step import DeviceDrafter
from sglang.srt.model_executor.drafter import Drafter
from sglang.srt.model_executor.slot_state import SlotState
from sglang.srt.model_executor.step_plan import SpecShape
from sglang.srt.models.decoder import DecoderModel
from sglang.srt.models.draft_model import DraftModel
from sglang.srt.sampling.kernel_sampler import KernelSampler
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from sglang.srt.speculative.history import TokenHistory
from sglang.srt.speculative.kernel_drafter import KernelDrafter
from sglang.srt.speculative.kernel_ngram import KernelNgram
from sglang.srt.speculative.kernel_standalone import WINDOW, KernelStandalone, StandaloneReader
from sglang.srt.speculative.kernel_sync import KernelSync
from sglang.srt.speculative.ngram_worker import NgramWorker


@dataclass(frozen=True, slots=True)
class WiredDrafter:
    pools: tuple[KVPool, ...]  # its own
    worker: Drafter  # is told of admissions
    decode: DeviceDrafter
    prompts: Drafter
    reader: StandaloneReader | None = None  # reads along with every plan


def wire_model(
    model: DraftModel, config: WorkerConfig, spec: SpecShape, state: SlotState, sampler: KernelSampler
) -> WiredDrafter:
    """A draft model of one layer."""
    pool, backend = kernel_attention(model, config, state.page_table)
    backend.reserve(config.num_slots, 1)
    backend.reserve(config.max_spec_rows, spec.topk, spec.topk * (spec.num_steps - 1))
    worker = EAGLEWorkerV2(model, pool, backend, sampler.states, spec, model.aux_layers)
    decode = KernelDrafter(model, backend, state, sampler, spec)
    return WiredDrafter((pool,), worker, decode, KernelSync(worker, model, backend))


def make_history(loaded: LoadedDrafter | None, config: WorkerConfig) -> TokenHistory | None:
    """Of a drafter that goes by tokens alone; no pool's size changes it."""
    if loaded is None or not goes_by_tokens(loaded):
        return None
    unknown = -1 if loaded.decoder is None else 0  # a model reads ids alone
    return TokenHistory(config.num_rows, config.max_positions, config.device, unknown, torch.int32)


def wire_decoder(
    model: DecoderModel,
    config: WorkerConfig,
    state: SlotState,
    sampler: KernelSampler,
    history: TokenHistory,
) -> WiredDrafter:
    """A model of its own."""
    pool, backend = kernel_attention(model, config, state.page_table)
    backend.reserve(config.num_slots, 1)
    backend.reserve(config.max_spec_rows, WINDOW)
    reader = StandaloneReader(model, backend, state, history)
    decode = KernelStandalone(model, backend, sampler, history)
    return WiredDrafter((pool,), reader, decode, reader, reader)


def wire_ngram(history: TokenHistory) -> WiredDrafter:
    worker = NgramWorker(history)
    return WiredDrafter((), worker, KernelNgram(history), worker)

"""The drafter of an executor: its weights, and on a CPU the object that steps ask for drafts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang.srt.configs.draft_choice import DraftChoice, choose_drafter
from sglang.srt.configs.executor_args import ExecutorArgs
from sglang.srt.configs.model_config import ModelConfig, ModelConfigError
from sglang.srt.configs.quant_args import check_quantization
from sglang.srt.configs.speculative_args import CHAINS_ONLY, EAGLE3, NEXTN, NGRAM, STANDALONE
from sglang.srt.layers.attention.base import DraftAttentionBackend
from sglang.srt.layers.attention.mla_native import TorchNativeMLA
from sglang.srt.layers.attention.torch_native import TorchNativeAttention
from sglang.srt.mem_cache.kv_pool import MHAKVPool
from sglang.srt.mem_cache.mla_pool import MLAKVPool
from sglang.srt.mem_cache.pool import KVPool
from sglang.srt.model_executor.config import WorkerConfig
from sglang.srt.model_executor.drafter import Drafter
from sglang.srt.model_executor.step_plan import SpecShape
from sglang.srt.model_loader.checkpoint import open_source
from sglang.srt.models.decoder import DecoderModel
from sglang.srt.models.draft_model import DraftModel
from sglang.srt.models.nextn import NextnHead
from sglang.srt.models.registry import build_drafter, build_model
from sglang.srt.sampling.states import SamplingStates
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from sglang.srt.speculative.history import TokenHistory
from sglang.srt.speculative.ngram_worker import NgramWorker
from sglang.srt.speculative.standalone_worker import StandaloneWorker


@dataclass(frozen=True, slots=True)
class LoadedDrafter:
    """What a drafter's kind needs, and no more."""

    kind: str
    model: DraftModel | None = None  # EAGLE3, NEXTN: one layer
    decoder: DecoderModel | None = None  # STANDALONE: a whole model

    @property
    def own(self) -> DraftModel | DecoderModel | None:
        return self.model or self.decoder

    @property
    def feature_size(self) -> int:
        return 0 if self.model is None else self.model.feature_size


def draft_kind(args: ExecutorArgs) -> str | None:
    """None: no drafter."""
    return args.draft_kind or (None if args.draft_model_path is None else EAGLE3)


def choose(args: ExecutorArgs, target: ModelConfig) -> DraftChoice | None:
    """
    Raises:
        ModelConfigError: the folder holds no drafter of this kind, or one for another target.
    """
    kind = draft_kind(args)
    if kind is None:
        return None
    choice = choose_drafter(kind, args.draft_model_path, target)
    if choice.config is not None and choice.folder is not None and args.draft_model_path is not None:
        option, wanted = "--speculative-draft-model-quantization", args.draft_quantization
        check_quantization(option, wanted, choice.config.quant, choice.folder)
    return choice


def load_drafter(
    args: ExecutorArgs,
    choice: DraftChoice,
    target: DecoderModel,
    spec: SpecShape,
    dtype: torch.dtype,
    device: torch.device,
    positions: int,
) -> LoadedDrafter:
    """
    Raises:
        WeightError: the checkpoint's tensors are not those of the config.
        ModelConfigError: it is a draft model of another target, or its vocabulary is smaller than topk.
    """
    if spec.topk > 1 and choice.kind in CHAINS_ONLY:
        raise ModelConfigError(f"speculation with {choice.kind} drafts chains alone: topk must be 1")
    if choice.config is None or choice.folder is None:
        return LoadedDrafter(choice.kind)
    load_format = args.draft_load_format or args.load_format
    source = open_source(choice.folder, load_format, dtype, device, choice.config.quant)
    if choice.kind == STANDALONE:
        decoder = build_model(choice.config, source, dtype, device, positions, target.tp)
        return LoadedDrafter(choice.kind, decoder=decoder)
    model: DraftModel
    if choice.kind == NEXTN:
        model = NextnHead(choice.config, source, target)
    else:
        model = build_drafter(choice.config, source, target, dtype, device, positions)
    if spec.topk > len(model.target_ids):
        raise ModelConfigError(
            f"{choice.folder}: topk is {spec.topk}, but the draft vocabulary has {len(model.target_ids)} ids"
        )
    return LoadedDrafter(choice.kind, model)


def make_drafter(
    loaded: LoadedDrafter, config: WorkerConfig, page_table: torch.Tensor, states: SamplingStates
) -> tuple[Drafter, tuple[KVPool, ...]]:
    """A CPU's, and the pools that are its own."""
    assert config.spec is not None
    if loaded.kind == NGRAM:
        history = TokenHistory(config.num_rows, config.max_positions, config.device, unknown=-1)
        return NgramWorker(history), ()
    assert loaded.own is not None
    pool = loaded.own.kv_shape.make_pool(
        config.num_pages, config.page_size, config.cache_dtype, config.device, config.dtype
    )
    backend = native_attention(pool, page_table)
    if loaded.decoder is not None:
        history = TokenHistory(config.num_rows, config.max_positions, config.device)
        return StandaloneWorker(loaded.decoder, backend, states, history), (pool,)
    assert loaded.model is not None
    model = loaded.model
    return EAGLEWorkerV2(model, pool, backend, states, config.spec, model.aux_layers), (pool,)


def native_attention(pool: KVPool, page_table: torch.Tensor) -> DraftAttentionBackend:
    """In plain PyTorch, of the pool's kind."""
    if isinstance(pool, MLAKVPool):
        return TorchNativeMLA(pool, page_table)
    assert isinstance(pool, MHAKVPool)
    return TorchNativeAttention(pool, page_table)


def goes_by_tokens(drafter: LoadedDrafter) -> bool:
    """Whether it must be told of tokens that no prefill brings."""
    return drafter.kind in (NGRAM, STANDALONE)

"""The CUDA half of ``executor_build``: what has to be in memory before what, and why.

1. weights; 2. slot state and sampler; 3. a trial with a KV pool of one page: kernels are compiled, ways
to carry out a product are timed, short prefills and the largest steps run once (so that no prompt waits for
a compiler) and the largest graphs are captured, so it is known what they need; 4. the KV pool, of what is
left; 5. the graphs. They come last because they hold the pool's address, and the trial comes first because
the pool's size depends on theirs.
"""

from __future__ import annotations

import gc
import logging
import time
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from sgl_kernel.launch import compile_ahead
from sgl_kernel.linear.variants import MAX_GEMM_ROWS, ROW_CLASSES, ChoiceTable, row_class
from sglang.srt.configs.executor_args import ExecutorArgs
from sglang.srt.distributed.tensor_parallel import TensorParallel
from sglang.srt.layers.attention.base import AttentionBackend
from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttention
from sglang.srt.layers.attention.triton_backend import TritonAttention
from sglang.srt.layers.kernel_linear import KernelChoices
from sglang.srt.managers.executor_build_attention import check_backend, kernel_attention, prefill_planner
from sglang.srt.managers.executor_build_cuda_drafter import (
    WiredDrafter,
    make_history,
    wire_decoder,
    wire_model,
    wire_ngram,
)
from sglang.srt.managers.executor_build_drafter import LoadedDrafter
from sglang.srt.managers.executor_build_models import (
    ExecutorArgsError,
    LoadedModels,
    page_budget,
    spec_rows,
    worker_config,
)
from sglang.srt.mem_cache.pool import KVPool
from sglang.srt.model_executor.accept import TokenRewriter
from sglang.srt.model_executor.agreement import Agreement
from sglang.srt.model_executor.config import WorkerConfig
from sglang.srt.model_executor.decode_step import DecodeStep
from sglang.srt.model_executor.drafter import Drafter
from sglang.srt.model_executor.dry_run import largest_prefill, prefill_tokens, small_prefills
from sglang.srt.model_executor.graph_sizes import GraphKey, GraphSizes, plain_sizes, ragged_keys, spec_sizes
from sglang.srt.model_executor.memory import BYTES_A_GRAPH, DeviceMemory
from sglang.srt.model_executor.slot_state import SlotState
from sglang.srt.model_executor.split_graphs import SplitGraphs, split_sizes
from sglang.srt.model_executor.step import StepRunner
from sglang.srt.model_executor.step_graphs import Capture, CudaCapture, DecodeSteps, StepGraphs
from sglang.srt.model_executor.step_plan import PAD_SLOT, GraphSet, SpecShape, StepPlan
from sglang.srt.model_executor.tune_linears import tune_linears
from sglang.srt.model_executor.worker import Worker
from sglang.srt.models.decoder import DecoderModel
from sglang.srt.sampling.kernel_sampler import KernelSampler
from sglang.srt.speculative.kernel_standalone import StandaloneReader

logger = logging.getLogger(__name__)

TUNED_LAYERS = 6
"""Of the target, while kernels are timed: enough that weights come from memory."""


def start_device() -> torch.device:
    """The device, with a stream of its own for this thread: the default stream can't be captured.

    Everything is loaded, captured and replayed on that stream, so nothing ever waits for another.
    """
    if not torch.cuda.is_available():
        raise ExecutorArgsError("device cuda: PyTorch finds no NVIDIA GPU; use --device cpu")
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.set_stream(torch.cuda.Stream(device))
    return device


def build_cuda(
    args: ExecutorArgs,
    models: LoadedModels,
    simulated: TokenRewriter | None,
    chunk: int,
    *,
    check_agreement: bool = False,
) -> tuple[Worker, tuple[GraphSet, ...]]:
    """``chunk``: prompt tokens of a step where ``args`` say nothing.

    Ranks run the same steps in the same order all through it: there are collectives in them.
    """
    check_backend(args)
    plain, tp = None, models.target.tp
    if not args.disable_cuda_graph:
        plain = plain_sizes(args.max_running_requests, args.cuda_graph_max_bs, args.cuda_graph_bs)
    config = worker_config(args, models, 1, args.max_running_requests if plain is None else plain[-1])
    sizes = None if plain is None else _graph_sizes(args, config, plain, _may_be_ragged(args, models))
    wiring = _Wiring(args, models, config, simulated)
    _wake_library(models)
    choices = _use_kernels(models, args.kernel_choices_file)
    models.target.agree_on_norms()
    tokens = prefill_tokens(args.chunked_prefill_size or chunk, args.max_prefill_tokens, config.context_len)
    memory = _measure(wiring, sizes, choices, tokens, tp)
    if args.kernel_choices_file is not None and tp.rank == 0:  # the others' are for the same products
        _save_choices(choices.table, Path(args.kernel_choices_file))
    budget = page_budget(args, models, memory.for_kv(args.mem_fraction_static), mem_fraction=1.0)
    config = replace(config, num_pages=tp.least(budget.num_pages()))
    wired = wiring.wire(config)
    graphs = None
    sets: tuple[GraphSet, ...] = ()
    split = None
    if sizes is not None:
        capture = CudaCapture(config.device)
        graphs = StepGraphs(wired.step, capture, sizes, config.spec, config.device)
        sets = graphs.capture_all()
        if args.masked_steps:
            split = _split_graphs(wired.step, capture, sizes, config)
            split.capture_all()
    decode_steps = DecodeSteps(wired.step, graphs, config.device, split)
    agreement = Agreement(tp, wiring.state) if check_agreement else None
    worker = Worker(
        config,
        wiring.state,
        wiring.sampler,
        wired.pools,
        wired.drafter,
        wired.runner,
        decode_steps,
        agreement,
        wired.reader,
    )
    torch.cuda.synchronize()
    return worker, sets


def _may_be_ragged(args: ExecutorArgs, models: LoadedModels) -> bool:
    """Whether steps whose rows have draft lengths of their own are wanted, and can be: a tree's nodes are
    verified together, latent attention counts on rows with the same number of queries, and a step that is not
    padded would seldom have just the tokens of a graph.
    """
    shapes = [models.target.config, *([models.draft_model.config] if models.draft_model else [])]
    is_latent = any(shape.mla is not None for shape in shapes)
    return args.ragged_steps and args.topk == 1 and not is_latent and not args.disable_cuda_graph_padding


def _graph_sizes(
    args: ExecutorArgs, config: WorkerConfig, plain: tuple[int, ...], may_be_ragged: bool
) -> GraphSizes:
    sizes = {0: plain}
    for draft_len, rows in spec_rows(args, config.spec, plain[-1]).items():
        sizes[draft_len] = spec_sizes(rows, args.cuda_graph_bs)
    ragged = ragged_keys(sizes) if may_be_ragged else ()
    return GraphSizes(sizes, pad=not args.disable_cuda_graph_padding, ragged=ragged)


def _split_graphs(step: DecodeStep, capture: Capture, sizes: GraphSizes, config: WorkerConfig) -> SplitGraphs:
    """They share the memory of the others, with their capture."""
    return SplitGraphs(step, capture, split_sizes(sizes), config.spec, config.vocab_size, config.device)


@dataclass(frozen=True, slots=True)
class _Wired:
    """What is bound to a KV pool."""

    pools: tuple[KVPool, ...]
    drafter: Drafter | None
    step: DecodeStep
    runner: StepRunner
    reader: StandaloneReader | None

    def run(self, plan: StepPlan) -> None:
        """One with a prompt, without a worker."""
        if self.reader is not None:
            self.reader.read(plan)
        self.runner.run(plan)


class _Wiring:
    """State and sampler, which no pool's size changes, and the rest for a pool of any size."""

    def __init__(
        self,
        args: ExecutorArgs,
        models: LoadedModels,
        config: WorkerConfig,
        simulated: TokenRewriter | None,
    ) -> None:
        self.config = config
        self.masked_steps = args.masked_steps
        self.state = SlotState(config)
        self.sampler = KernelSampler(config.num_rows, config.vocab_size, config.device)
        num_nodes = config.spec.num_draft_tokens if config.spec else 0
        self.sampler.reserve(max(config.num_slots, config.max_spec_rows * num_nodes))
        self._history = make_history(models.drafter, config)
        self._planner = prefill_planner(args, models, config, self.state.page_table)
        self._models = models
        self._simulated = simulated

    def first_layers(self, num_layers: int) -> DecoderModel:
        """The target cut short, over the same weights."""
        short = copy(self._models.target)
        short.layers = short.layers[:num_layers]
        return short

    def wire(self, config: WorkerConfig, target: DecoderModel | None = None) -> _Wired:
        """``target``: instead of the model's own."""
        models, state, sampler, spec = self._models, self.state, self.sampler, config.spec
        target = target or models.target
        pool, backend = kernel_attention(target, config, state.page_table)
        backend.reserve(config.num_slots, 1)
        pools: tuple[KVPool, ...] = (pool,)
        worker = drafts = prompts = reader = None
        if models.drafter is not None and spec is not None:
            backend.reserve(config.max_spec_rows, spec.num_draft_tokens)
            drafter = self._wire_drafter(models.drafter, config, spec)
            pools = (pool, *drafter.pools)
            worker, drafts, prompts = drafter.worker, drafter.decode, drafter.prompts
            reader = drafter.reader
        step = DecodeStep(state, sampler, target, pool, backend, spec, drafts, self._simulated)
        attention: AttentionBackend = backend
        if self._planner is not None:
            assert isinstance(backend, TritonAttention), "FlashInfer plans for it alone"
            attention = FlashInferAttention(backend, self._planner)
        runner = StepRunner(state, sampler, target, pool, attention, prompts, self._simulated)
        return _Wired(pools, worker, step, runner, reader)

    def _wire_drafter(self, loaded: LoadedDrafter, config: WorkerConfig, spec: SpecShape) -> WiredDrafter:
        if loaded.model is not None:
            return wire_model(loaded.model, config, spec, self.state, self.sampler)
        assert self._history is not None, "without a layer it goes by tokens"
        if loaded.decoder is not None:
            return wire_decoder(loaded.decoder, config, self.state, self.sampler, self._history)
        return wire_ngram(self._history)


def _wake_library(models: LoadedModels) -> None:
    """The library of matrix products takes memory when it is first used, which a capture forbids."""
    x = torch.ones(16, 16, dtype=models.dtype, device=models.device)
    torch.addmm(x[0], x, x)
    torch.mm(x, x)


def _use_kernels(models: LoadedModels, file: str | None) -> KernelChoices:
    """Products of half-precision weights go to sgl_kernel; ``file`` may hold choices of an earlier start."""
    name = torch.cuda.get_device_name(models.device)
    table = ChoiceTable(name) if file is None else _load_choices(Path(file), name)
    choices = KernelChoices(table, models.device)
    linears = models.target.linears() + (models.draft_model.linears() if models.draft_model else [])
    for linear in linears:
        if linear.weight.dtype in (torch.bfloat16, torch.float16):
            linear.use_kernels(choices)
    return choices


def _load_choices(file: Path, device: str) -> ChoiceTable:
    if not file.parent.is_dir():
        raise ExecutorArgsError(f"--kernel-choices-file {file}: there is no folder {file.parent}")
    try:
        return ChoiceTable.load(file, device)
    except (ValueError, OSError) as error:
        raise ExecutorArgsError(
            f"--kernel-choices-file {file} holds no choices ({error}): remove it, and it is made anew"
        ) from error


def _save_choices(table: ChoiceTable, file: Path) -> None:
    try:
        table.save(file)
    except (OSError, ValueError) as error:
        raise ExecutorArgsError(f"--kernel-choices-file {file} can't be written: {error}") from error


def telling_keys(sizes: GraphSizes, spec: SpecShape | None) -> list[GraphKey]:
    """Keys with products of as many rows as a class of them ever has, small steps first.

    The other keys' products take what these are timed for.
    """

    def rows_of(key: GraphKey) -> set[int]:
        return {key.rows, key.rows * (spec.num_nodes(key.draft_len) if spec else 1)}

    common = [key for key in reversed(sizes.capture_order(spec)) if not key.tokens]
    keys = [key for key in common if key.rows <= MAX_GEMM_ROWS]
    small = sorted(rows for rows in set().union(*map(rows_of, keys)) if rows <= MAX_GEMM_ROWS)
    most = {row_class(rows): rows for rows in small}  # of a class the last, its largest
    return [key for key in keys if not rows_of(key).isdisjoint(most.values())]


def _tune(wiring: _Wiring, sizes: GraphSizes, choices: KernelChoices, tp: TensorParallel) -> None:
    """Over the target's first layers: the others are the same, and it takes a fifth."""
    short = wiring.wire(wiring.config, wiring.first_layers(TUNED_LAYERS)).step
    slots = torch.full((MAX_GEMM_ROWS,), PAD_SLOT, dtype=torch.int64, device=wiring.config.device)
    keys = telling_keys(sizes, wiring.config.spec)
    steps = [partial(short.run, slots[: key.rows], key.draft_len) for key in keys]
    report = tune_linears(choices, steps, tp=tp)
    logger.info(
        "products of few rows: %d; %d variants timed, %d steps, in %.1f s",
        report.num_problems, report.num_variants, report.num_steps, report.seconds,
    )  # fmt: skip


def _measure(
    wiring: _Wiring,
    sizes: GraphSizes | None,
    choices: KernelChoices,
    tokens: int,
    tp: TensorParallel,
) -> DeviceMemory:
    """What steps and graphs need; ``tokens``: of the largest prefill. Every tensor of the trial is gone when
    this returns."""
    config = wiring.config
    device = config.device
    trial = wiring.wire(config)
    capture, graphs, split = CudaCapture(device), None, None
    if sizes is not None:
        graphs = StepGraphs(trial.step, capture, sizes, config.spec, device)
        tp.first_alone(partial(graphs.compile_ahead, compile_ahead))
        _tune(wiring, sizes, choices, tp)
    _run_small_prefills(trial, config)
    activations = _run_largest(trial, config, tokens + config.num_slots)  # rows decode in a mixed step
    graph_bytes = 0
    if graphs is not None and sizes is not None:
        used = capture.used_bytes()
        for key in sizes.largest():  # they share their pool, as all will
            graphs.capture_key(key)
        num_graphs = len(sizes.capture_order(config.spec))
        if wiring.masked_steps:
            split = _split_graphs(trial.step, capture, sizes, config)
            for key in split.sizes.largest():
                split.capture_key(key)
            num_graphs += split.num_graphs
        graph_bytes = capture.used_bytes() - used + BYTES_A_GRAPH * num_graphs
    del trial, graphs, capture, split
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    memory = DeviceMemory(total, free, torch.cuda.memory_reserved(device), activations, graph_bytes)
    logger.info(
        "memory: %.1f GiB, free %.1f; weights and state %.1f, a step at most %.2f, graphs about %.2f",
        *(size / 2**30 for size in (total, free, memory.own, activations, graph_bytes)),
    )
    return memory


@torch.inference_mode()
def _run_small_prefills(trial: _Wired, config: WorkerConfig) -> None:
    """So that no prompt waits for a kernel to be compiled."""
    began = time.perf_counter()
    for plan in small_prefills(ROW_CLASSES, config.num_slots, config.context_len):
        trial.run(plan)
    if trial.reader is not None:
        trial.reader.warm_up()
    torch.cuda.synchronize(config.device)
    logger.info("kernels of short prefills: ready in %.1f s", time.perf_counter() - began)


@torch.inference_mode()
def _run_largest(trial: _Wired, config: WorkerConfig, num_tokens: int) -> int:
    """Bytes that the largest steps take while they run, all of pad slots."""
    device = config.device
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    trial.run(largest_prefill(num_tokens, config.num_slots, config.context_len))
    largest = [(config.num_slots, 0)]
    if config.spec is not None:
        largest.append((config.max_spec_rows, config.spec.num_steps))
    for num_rows, draft_len in largest:
        slots = torch.full((num_rows,), PAD_SLOT, dtype=torch.int64, device=device)
        trial.step.run(slots, draft_len)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_reserved(device) - before
    torch.cuda.empty_cache()
    return peak

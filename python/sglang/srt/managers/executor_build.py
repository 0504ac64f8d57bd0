"""Build an executor from plain arguments: configs, weights, pools, state, drafter, worker."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec

import torch

from sglang.srt.configs.executor_args import ExecutorArgs
from sglang.srt.distributed.collectives import file_store, open_gloo
from sglang.srt.distributed.tensor_parallel import TensorParallel
from sglang.srt.managers.executor_build_drafter import goes_by_tokens, make_drafter, native_attention
from sglang.srt.managers.executor_build_fp4 import check_fp4, use_fp4_inputs
from sglang.srt.managers.executor_build_models import (
    ExecutorArgsError,
    LoadedModels,
    load_models,
    make_pool,
    max_spec_rows,
    page_budget,
    stream_shape,
    worker_config,
)
from sglang.srt.mem_cache.pool import KVPool
from sglang.srt.model_executor.accept import TokenRewriter
from sglang.srt.model_executor.agreement import CHECK_VARIABLE, Agreement
from sglang.srt.model_executor.config import WorkerConfig
from sglang.srt.model_executor.drafter import Drafter
from sglang.srt.model_executor.dry_run import prefill_tokens
from sglang.srt.model_executor.in_process_executor import InProcessExecutor
from sglang.srt.model_executor.measure_costs import (
    CPU_EFFORT,
    CUDA_EFFORT,
    AgreedStopwatch,
    DeviceStopwatch,
    HostStopwatch,
    captured_order,
    eager_order,
    measure_costs,
    ragged_order,
)
from sglang.srt.model_executor.memory import CPU_CHUNK, available_bytes, default_chunk
from sglang.srt.model_executor.slot_state import SlotState
from sglang.srt.model_executor.step import StepRunner
from sglang.srt.model_executor.step_memory import StepSizes, step_bytes
from sglang.srt.model_executor.step_plan import ExecutorInfo, GraphSet, StepCost
from sglang.srt.model_executor.worker import Worker
from sglang.srt.sampling.sampler import Sampler
from sglang.srt.speculative.simulate import SimulationError, simulated_acceptance

logger = logging.getLogger(__name__)


def build_executor(args: ExecutorArgs) -> InProcessExecutor:
    """Load the models and start the executor.

    Raises:
        ExecutorArgsError: unknown dtype, attention backend, an impossible shape of speculation, or
            ``SGLANG_SIMULATE_ACC_*`` that can't be used.
        ModelConfigError, WeightError: a model folder that can't be used.
        OutOfMemoryError: no request fits in the memory given.
    """
    if args.tp_size != 1:
        raise ExecutorArgsError(
            f"--tp-size {args.tp_size} is for a server, which starts a process for each rank"
        )
    return InProcessExecutor(lambda: build_worker(args, TensorParallel()))


def build_rank(args: ExecutorArgs, rank: int, meeting: str) -> InProcessExecutor:
    """One rank of ``args.tp_size``, each in a process of its own. ``meeting``: a file that none has made yet.

    Raises:
        ShardingError: the model can't be split over so many ranks.
        PeerLostError: another rank is gone.
        And what ``build_executor`` raises.
    """

    def assemble() -> tuple[Worker, ExecutorInfo]:
        store = file_store(meeting, args.tp_size)
        if args.device == "cuda":
            from sglang.srt.distributed.gpus import open_gpus

            _need_packages()
            collectives = open_gpus(
                store,
                rank,
                args.tp_size,
                pushes=args.fuse_all_reduce or not args.disable_custom_all_reduce,
                only_fused=args.disable_custom_all_reduce,
                stream=stream_shape(args),
                flashinfer=args.flashinfer_sums,
            )
        else:
            collectives = open_gloo(store, rank, args.tp_size)
        return build_worker(args, TensorParallel(rank, args.tp_size, collectives))

    return InProcessExecutor(assemble)


def build_worker(args: ExecutorArgs, tp: TensorParallel) -> tuple[Worker, ExecutorInfo]:
    """To be called by the thread that the worker will run in."""
    if args.device == "cuda":
        _need_packages()
        # Only here: a CPU server needs nothing of sgl_kernel.
        from sglang.srt.managers.executor_build_attention import check_backend
        from sglang.srt.managers.executor_build_cuda import build_cuda, start_device
        from sglang.srt.managers.executor_build_limits import limits_told

        device = start_device()
        check_backend(args)
        check_fp4(args)
        chunk = tp.least(default_chunk(torch.cuda.get_device_properties(device).total_memory))
        with limits_told():
            models = load_models(args, device, tp)
            use_fp4_inputs(args, models)
            worker, graphs = build_cuda(
                args, models, _simulated(models), chunk, check_agreement=_checks_agreement()
            )
        return worker, _info(worker, models, chunk, graphs, _costs(args, worker, graphs, tp))
    check_fp4(args)
    models = load_models(args, torch.device(args.device), tp)
    worker = _build_cpu(args, models, tp)
    return worker, _info(worker, models, CPU_CHUNK, (), _costs(args, worker, (), tp))


def _need_packages() -> None:
    for name in ("sgl_kernel", "triton"):
        if find_spec(name) is None:
            raise ExecutorArgsError(
                f"--device cuda needs the package {name}: pip install './sgl-kernel[cuda]' in the project's"
                " folder, or use --device cpu"
            )


def _costs(
    args: ExecutorArgs, worker: Worker, graphs: tuple[GraphSet, ...], tp: TensorParallel
) -> tuple[StepCost, ...]:
    if not args.measure_costs:
        return ()
    config = worker.config
    keys = captured_order(graphs) or eager_order(
        _draft_lens(config, graphs), config.num_slots, config.max_spec_rows
    )
    on_gpu = config.device.type == "cuda"
    effort = CUDA_EFFORT if on_gpu else CPU_EFFORT
    if args.measure_costs_s is not None:
        budget_s = args.measure_costs_s
        effort = replace(
            effort, budget_s=budget_s, ragged_budget_s=budget_s, repeats=2 * effort.repeats, patience_s=None
        )
    watch = DeviceStopwatch() if on_gpu else HostStopwatch()
    ragged = ragged_order(graphs)
    if tp.size == 1:
        return measure_costs(worker, keys, effort, watch, ragged=ragged)
    # What is measured decides what is measured next, and ranks must do the same.
    agreed = AgreedStopwatch(watch, tp.first)
    return measure_costs(worker, keys, effort, agreed, lambda: tp.first(time.perf_counter()), ragged)


def _draft_lens(config: WorkerConfig, graphs: tuple[GraphSet, ...]) -> tuple[int, ...]:
    """Of the speculative steps that were captured; eager ones can have any."""
    if graphs:
        return tuple(sorted(captured.draft_len for captured in graphs if captured.draft_len))
    return tuple(range(1, config.spec.num_steps + 1)) if config.spec else ()


def _info(
    worker: Worker,
    models: LoadedModels,
    chunk: int,
    graphs: tuple[GraphSet, ...],
    costs: tuple[StepCost, ...],
) -> ExecutorInfo:
    config = worker.config
    info = ExecutorInfo(
        num_slots=config.num_slots,
        num_pages=config.num_pages,
        page_size=config.page_size,
        context_len=config.context_len,
        vocab_size=config.vocab_size,
        spec=config.spec,
        max_spec_rows=config.max_spec_rows,
        weight_bytes=models.weight_bytes,
        kv_bytes=sum(pool.bytes for pool in worker.pools),
        device=config.device.type,
        device_name=torch.cuda.get_device_name(config.device) if config.device.type == "cuda" else "cpu",
        default_chunk=chunk,
        graphs=graphs,
        costs=costs,
        wants_ids=models.drafter is not None and goes_by_tokens(models.drafter),
        draft_lens=_draft_lens(config, graphs),
    )
    if info.spec is not None:
        log_spec_version(os.environ)
    logger.info(
        "weights %.1f MiB, KV cache of %d tokens %.1f MiB, dtype %s, of the cache %s",
        info.weight_bytes / 2**20, info.num_pages * info.page_size, info.kv_bytes / 2**20, config.dtype,
        config.cache_dtype,
    )  # fmt: skip
    return info


def log_spec_version(environ: Mapping[str, str]) -> None:
    """``SGLANG_ENABLE_SPEC_V2`` is accepted for upstream's sake: there is one speculative worker here."""
    given = environ.get("SGLANG_ENABLE_SPEC_V2")
    note = "" if given is None else f" (SGLANG_ENABLE_SPEC_V2={given} changes nothing)"
    logger.info("speculative worker: EAGLEWorkerV2%s", note)


def _simulated(models: LoadedModels) -> TokenRewriter | None:
    try:
        return simulated_acceptance(os.environ, models.spec, models.target.config.vocab_size, models.device)
    except SimulationError as error:
        raise ExecutorArgsError(str(error)) from error


def _checks_agreement() -> bool:
    return os.environ.get(CHECK_VARIABLE) == "1"


def _build_cpu(args: ExecutorArgs, models: LoadedModels, tp: TensorParallel) -> Worker:
    available = available_bytes(models.device) // tp.size  # all ranks are on this host
    budget = page_budget(args, models, available, args.mem_fraction_static)
    budget = replace(budget, step_bytes=_step_bytes(args, models, int(available * args.mem_fraction_static)))
    num_pages = tp.least(budget.num_pages())
    config = worker_config(args, models, num_pages, most_spec_rows=args.max_running_requests)
    return _assemble(args, config, models, tp)


def _step_bytes(args: ExecutorArgs, models: LoadedModels, kv_bytes: int) -> int:
    """What the largest step needs, with a pool of ``kv_bytes`` at most."""
    context_len = models.target.config.context_len
    chunk = args.chunked_prefill_size or CPU_CHUNK
    sizes = StepSizes(
        num_slots=args.max_running_requests,
        prefill_tokens=prefill_tokens(chunk, args.max_prefill_tokens, context_len),
        context_len=context_len,
        pool_tokens=args.max_total_tokens or kv_bytes // models.bytes_per_place,
        spec=models.spec,
        max_spec_rows=max_spec_rows(args, models, args.max_running_requests),
    )
    drafter = None if models.draft_model is None else models.draft_model.config
    return step_bytes(models.target.config, drafter, sizes, models.dtype.itemsize)


def _assemble(args: ExecutorArgs, config: WorkerConfig, models: LoadedModels, tp: TensorParallel) -> Worker:
    state = SlotState(config)
    sampler = Sampler(config.num_rows, config.vocab_size, config.device)
    if args.attention_backend != "torch_native":
        raise ExecutorArgsError(f"attention backend {args.attention_backend!r} is not one of: torch_native")
    pool = make_pool(models.target.kv_shape, config)
    backend = native_attention(pool, state.page_table)
    pools: tuple[KVPool, ...] = (pool,)
    drafter: Drafter | None = None
    if models.drafter is not None and config.spec is not None:
        drafter, draft_pools = make_drafter(models.drafter, config, state.page_table, sampler.states)
        pools = (pool, *draft_pools)
    runner = StepRunner(state, sampler, models.target, pool, backend, drafter, _simulated(models))
    agreement = Agreement(tp, state) if _checks_agreement() else None
    return Worker(config, state, sampler, pools, drafter, runner, agreement=agreement)

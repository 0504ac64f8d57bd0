"""Starts the executor that a server's settings ask for. Imports torch only for the one in this process."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from sglang.srt.configs.executor_args import ExecutorArgs
from sglang.srt.distributed.link_report import check_flashinfer, check_links
from sglang.srt.model_executor.executor import Executor
from sglang.srt.model_executor.multi_process_executor import MultiProcessExecutor, WorkerError
from sglang.srt.utils.child_process import Child, start_child

logger = logging.getLogger(__name__)

_THREADS = "OMP_NUM_THREADS"
_NO_PEERS = "NCCL_P2P_DISABLE"


def start_executor(args: ExecutorArgs, log_level: str, on_failure: Callable[[str], None]) -> Executor:
    """``on_failure``: see ``MultiProcessExecutor``.

    Raises:
        ExecutorArgsError, ModelConfigError, WeightError, OutOfMemoryError: see ``build_executor``.
        WorkerError: with several ranks, whatever ended one of them.
    """
    tp_size = args.tp_size
    if tp_size == 1:
        from sglang.srt.managers.executor_build import build_executor

        return build_executor(args)
    threads = threads_of_a_rank(tp_size)
    environ = {} if _THREADS in os.environ else {_THREADS: str(threads)}
    if args.device == "cuda":
        args, more = by_links(args, os.environ)
        environ |= more
        logger.info("tensor parallel: %d workers, a GPU each", tp_size)
    else:
        logger.info(
            "tensor parallel: %d workers, %d threads each; sums over them by Gloo on the loopback interface",
            tp_size, threads,
        )  # fmt: skip

    def start(rank: int, folder: Path) -> Child:
        config = {
            "folder": str(folder),
            "rank": rank,
            "args": msgspec.to_builtins(args),
            "log_level": log_level,
        }
        module = "sglang.srt.managers.worker_process"
        # It is never long without the interpreter, so it sees its parent's end, and can clean up then.
        return start_child(
            f"tensor-parallel worker {rank}",
            module,
            msgspec.msgpack.encode(config),
            kill_with_parent=False,
            environ=environ,
        )

    return MultiProcessExecutor(tp_size, start, on_failure)


def by_links(args: ExecutorArgs, environ: Mapping[str, str]) -> tuple[ExecutorArgs, dict[str, str]]:
    """What the GPUs' links allow, and what that adds to the environment of the workers.

    Raises:
        WorkerError: there are fewer GPUs than ranks.
    """
    # NCCL's watcher ends a process in which it finds its own thread stuck, without a word to the user; here
    # the parent watches the workers.
    more = {"TORCH_NCCL_ENABLE_MONITORING": "0"}
    by_nccl = replace(args, disable_custom_all_reduce=True, fuse_all_reduce=False)
    if environ.get(_NO_PEERS) == "1":
        logger.info("%s=1: the GPUs' links are not tried, and sums go through the host's memory", _NO_PEERS)
        return by_nccl, more
    pushes = args.fuse_all_reduce or not args.disable_custom_all_reduce
    report = check_links(args.tp_size, pushes=pushes)
    if 0 <= report.gpus < args.tp_size:
        raise WorkerError(f"--tp-size {args.tp_size}: there are {report.gpus} GPUs here; use a smaller one")
    if not report.reachable:
        logger.info("links of the GPUs: %s; NCCL goes the way it finds", report.why)
        return by_nccl, more
    if not report.copies:
        logger.warning(
            "links of the GPUs: %s; they are not used (%s=1), so sums go through the host's memory and are"
            " slower. On many hosts the cause is the IOMMU: try iommu=off, or iommu=pt, for the kernel",
            report.why, _NO_PEERS,
        )  # fmt: skip
        return by_nccl, more | {_NO_PEERS: "1"}
    logger.info(
        "links of the GPUs: tried in %.1f s; a copy of 8 MiB between two, the slowest: %.1f GB/s",
        report.seconds, report.slowest_gbs,
    )  # fmt: skip
    if pushes and not report.pushes:
        logger.warning("links of the GPUs: our own kernels can't use them (%s); sums by NCCL", report.why)
        return by_nccl, more
    return with_flashinfer(args) if args.fuse_all_reduce else args, more


def with_flashinfer(args: ExecutorArgs) -> ExecutorArgs:
    """With FlashInfer's sums where they can be had; a line in the log says why they can't."""
    report = check_flashinfer(args.tp_size)
    if report.flashinfer:
        logger.info("FlashInfer's sums over the GPUs: tried in %.1f s", report.seconds)
        return replace(args, flashinfer_sums=True)
    logger.warning(
        "--enable-flashinfer-allreduce-fusion: FlashInfer's kernels are not used (%s); sums are added to the"
        " residual stream, and normed, by our own kernels",
        report.why,
    )
    return args


def threads_of_a_rank(size: int) -> int:
    """Its share of the cores that this process may use."""
    return max(1, len(os.sched_getaffinity(0)) // size)

"""Starts the executor that a server's settings ask for. Imports torch only for the one in this process."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from sglang.srt.configs.executor_args import ExecutorArgs
from sglang.srt.model_executor.executor import Executor
from sglang.srt.model_executor.multi_process_executor import MultiProcessExecutor
from sglang.srt.utils.child_process import Child, start_child

logger = logging.getLogger(__name__)

_THREADS = "OMP_NUM_THREADS"


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
    logger.info(
        "tensor parallel: %d workers, %d threads each; sums over them by Gloo on the loopback interface",
        tp_size, threads,
    )  # fmt: skip
    environ = {} if _THREADS in os.environ else {_THREADS: str(threads)}

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


def threads_of_a_rank(size: int) -> int:
    """Its share of the cores that this process may use."""
    return max(1, len(os.sched_getaffinity(0)) // size)

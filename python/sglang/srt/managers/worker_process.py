"""The process of one rank: builds its worker, then carries out the plans that every rank gets."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
import traceback
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

import msgspec

from sglang.srt.configs.executor_args import ExecutorArgs
from sglang.srt.model_executor.executor import ExecutorStopped, PendingStep
from sglang.srt.model_executor.rank_messages import (
    PLANS,
    RESULTS,
    Failed,
    Started,
    Stopped,
    decode_masks,
    decode_plan,
    encode,
    status_ring,
)
from sglang.srt.model_executor.step_plan import StepPlan
from sglang.srt.utils.child_process import end_with_parent, read_config
from sglang.srt.utils.log import configure_logging
from sglang.srt.utils.openmp import spin_briefly
from sglang.srt.utils.shared_ring import RingClosedError, RingReader, RingWriter

if TYPE_CHECKING:
    from sglang.srt.model_executor.in_process_executor import InProcessExecutor


class WorkerProcessConfig(msgspec.Struct, frozen=True):
    folder: str  # of the rings, and where the ranks meet
    rank: int
    args: ExecutorArgs
    log_level: str


class RankServer:
    """Plans in, results out. Results are waited for by a thread of their own: a device may run behind."""

    def __init__(self, config: WorkerProcessConfig, status: RingWriter) -> None:
        self._config = config
        self._status = status
        self._folder = Path(config.folder)
        self._pending: SimpleQueue[tuple[StepPlan, PendingStep] | None] = SimpleQueue()

    def serve(self) -> None:
        # Only now: importing torch takes seconds, and the parent's watcher is at work by then.
        from sglang.srt.managers.executor_build import build_rank

        config = self._config
        executor = build_rank(config.args, config.rank, str(self._folder / "meeting"))
        plans = RingReader(self._folder, PLANS, config.args.tp_size, config.rank)
        self._status.send(encode(Started(executor.info)))
        results = threading.Thread(target=self._send_results, args=(executor,), name="results", daemon=True)
        results.start()
        while message := plans.receive():
            plan = decode_plan(message)
            self._pending.put((plan, executor.launch(plan)))
            if plan.masked:
                message = plans.receive()
                if not message:
                    break
                executor.supply(decode_masks(message))
        executor.shutdown()
        self._pending.put(None)
        results.join()
        self._status.send(encode(Stopped()))

    def _send_results(self, executor: InProcessExecutor) -> None:
        writer = RingWriter(self._folder, RESULTS, 1) if self._config.rank == 0 else None
        try:
            executor.enter_thread()
            while (launched := self._pending.get()) is not None:
                plan, pending = launched
                if writer is not None and plan.masked and plan.draft_len:
                    writer.send(encode(pending.drafts()))
                try:
                    result = pending.wait()
                except ExecutorStopped:  # the end came in place of its masks
                    return
                if writer is not None:
                    writer.send(encode(result))
        except BaseException as error:  # the thread's edge: no step is good after this one
            report(error, self._status)


def report(error: BaseException, status: RingWriter) -> None:
    """Say why, and end the process."""
    from sglang.srt.distributed.collectives import PeerLostError
    from sglang.srt.managers.executor_errors import is_for_user

    peer_lost = isinstance(error, PeerLostError)
    for_user = is_for_user(error)
    if not for_user and not peer_lost:
        traceback.print_exception(error)
    status.send(encode(Failed(str(error) or type(error).__name__, for_user, peer_lost)))
    sys.stderr.flush()
    os._exit(1)


def main() -> int:
    spin_briefly()
    config = msgspec.msgpack.decode(read_config(), type=WorkerProcessConfig)
    end_with_parent(lambda: shutil.rmtree(config.folder, ignore_errors=True))
    # What one rank says, the others would only repeat.
    level = config.log_level if config.rank == 0 else "warning"
    configure_logging(level, f"worker {config.rank}")
    status = RingWriter(Path(config.folder), status_ring(config.rank), 1)
    try:
        RankServer(config, status).serve()
    except RingClosedError:  # the parent has gone, and this thread saw it before its watcher did
        shutil.rmtree(config.folder, ignore_errors=True)
        os._exit(1)
    except Exception as error:
        report(error, status)
    logging.shutdown()
    # Not sys.exit: a thread of Gloo or of OpenMP must not keep the process alive.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

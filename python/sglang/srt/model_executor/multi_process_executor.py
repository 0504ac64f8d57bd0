"""An executor for several devices of one host: a worker process for each, all with the same plans.

The scheduler's process needs no torch. Plans go to all workers through one ring of shared memory; results
come from rank 0 alone. What ends a worker ends all of them, and is told by its name.
"""

from __future__ import annotations

import os
import select
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sglang.srt.model_executor.rank_messages import (
    PLANS,
    RESULTS,
    Failed,
    Started,
    Stopped,
    decode_drafts,
    decode_result,
    decode_status,
    encode,
    status_ring,
)
from sglang.srt.model_executor.step_plan import ExecutorInfo, StepDrafts, StepMidInput, StepPlan, StepResult
from sglang.srt.utils.child_process import Child, describe_exit, stop_children
from sglang.srt.utils.shared_ring import RingReader, RingWriter, create_ring

_WATCH_S: Final = 0.1
_LAST_WORDS_S: Final = 0.3  # a rank's end makes others fail: wait for all of them, then say whose it was
_RESULT_CHECK_S: Final = 0.05
_STOP_S: Final = 5.0
_SHARED_MEMORY: Final = Path("/dev/shm")


class WorkerError(RuntimeError):
    """A worker could not start, or ended; one line for the user, that names it."""


@dataclass(frozen=True, slots=True)
class _Launched:
    executor: MultiProcessExecutor
    step_id: int

    def drafts(self) -> StepDrafts:
        return self.executor.drafts_of(self.step_id)

    def wait(self) -> StepResult:
        return self.executor.result_of(self.step_id)


class MultiProcessExecutor:
    """``launch`` sends a plan to all ranks; ``wait`` gives rank 0's result, or raises ``WorkerError``.

    ``start``: starts the worker of a rank, which finds the rings in the folder that it is given.
    ``on_failure``: called by a thread of its own with one line when a worker has ended on its own accord,
    for a scheduler that waits for something else just then.
    """

    def __init__(
        self, size: int, start: Callable[[int, Path], Child], on_failure: Callable[[str], None]
    ) -> None:
        """
        Raises:
            WorkerError: a worker could not start.
        """
        self._folder = make_folder()
        self._on_failure = on_failure
        self._failure: WorkerError | None = None
        self._stopping = threading.Event()
        self._bells = create_ring(self._folder, PLANS, size) + create_ring(self._folder, RESULTS, 1)
        for rank in range(size):
            self._bells += create_ring(self._folder, status_ring(rank), 1)
        self._plans = RingWriter(self._folder, PLANS, size)
        self._results = RingReader(self._folder, RESULTS, 1)
        self._watched = [_Watched(rank, self._folder) for rank in range(size)]
        try:
            for watched in self._watched:
                watched.child = start(watched.rank, self._folder)
            self._info = self._wait_started()
        except BaseException:
            self._end()
            raise
        self._watcher = threading.Thread(target=self._watch, name="worker-watcher", daemon=True)
        self._watcher.start()

    @property
    def info(self) -> ExecutorInfo:
        """Rank 0's: bytes are of one device, the rest is the same on all."""
        return self._info

    @property
    def children(self) -> Sequence[Child]:
        return [watched.child for watched in self._watched if watched.child is not None]

    def launch(self, plan: StepPlan) -> _Launched:
        assert not self._stopping.is_set(), f"step {plan.step_id} was launched after shutdown"
        if self._failure is None:
            self._plans.send(encode(plan), alive=lambda: self._failure is None)
        return _Launched(self, plan.step_id)

    def supply(self, masks: StepMidInput) -> None:
        """To all ranks, each of which waits for them and for nothing else."""
        if self._failure is None:
            self._plans.send(encode(masks), alive=lambda: self._failure is None)

    def drafts_of(self, step_id: int) -> StepDrafts:
        """They come before the step's result, and after those of the steps before."""
        drafts = decode_drafts(self._next())
        assert drafts.step_id == step_id, f"waited for drafts of step {step_id}, of {drafts.step_id} came"
        return drafts

    def result_of(self, step_id: int) -> StepResult:
        """Of the oldest plan without one, which must be this."""
        result = decode_result(self._next())
        assert result.step_id == step_id, f"waited for step {step_id}, step {result.step_id} came"
        return result

    def _next(self) -> bytes:
        while (message := self._results.receive(_RESULT_CHECK_S)) is None:
            if self._failure is not None:
                raise self._failure
        return message

    def shutdown(self) -> None:
        """Finish the steps launched and end the workers. May be called again."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._watcher.join()
        if self._failure is None:
            self._plans.send(b"", alive=lambda: all(c.exit_code() is None for c in self.children))
            deadline = time.monotonic() + _STOP_S
            while time.monotonic() < deadline and any(c.exit_code() is None for c in self.children):
                time.sleep(0.01)
        self._end()

    # ---- watching

    def _wait_started(self) -> ExecutorInfo:
        """It takes as long as loading takes."""
        while not all(watched.info for watched in self._watched):
            self._look()
            if any(watched.is_over for watched in self._watched):
                raise self._blame()
        info = self._watched[0].info
        assert info is not None
        return info

    def _watch(self) -> None:
        while not self._stopping.is_set():
            self._look()
            if any(watched.is_over for watched in self._watched):
                failure = self._blame()
                if self._stopping.is_set():
                    return
                self._failure = failure
                stop_children(self.children, grace_s=0.0)
                shutil.rmtree(self._folder, ignore_errors=True)  # who is told may end the process at once
                self._on_failure(str(failure))
                return

    def _look(self) -> None:
        """Wait a moment for news of any worker, and read it."""
        ready = select.poll()
        for watched in self._watched:
            ready.register(watched.status.bell, select.POLLIN)
        ready.poll(_WATCH_S * 1000)
        for watched in self._watched:
            watched.look()

    def _blame(self) -> WorkerError:
        """Who ended first can't be told by when it is seen: a rank that lost another one says so."""
        deadline = time.monotonic() + _LAST_WORDS_S
        while time.monotonic() < deadline:
            self._look()
            time.sleep(0.01)
        over = [watched for watched in self._watched if watched.is_over]
        guilty = min(over, key=lambda watched: watched.innocence)
        return guilty.error()

    def _end(self) -> None:
        stop_children(self.children, grace_s=0.5)
        for bell in self._bells:
            os.close(bell)
        self._bells = []
        self._plans.close()
        self._results.close()
        for watched in self._watched:
            watched.status.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class _Watched:
    """One worker, and what it has said."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank = rank
        self.child: Child | None = None
        self.status = RingReader(folder, status_ring(rank), 1)
        self.info: ExecutorInfo | None = None
        self.failed: Failed | None = None
        self.code: int | None = None

    def look(self) -> None:
        if self.code is None and self.child is not None:
            self.code = self.child.exit_code()  # before its last words: all of them are there by then
        while (message := self.status.receive(0)) is not None:
            said = decode_status(message)
            if isinstance(said, Started):
                self.info = said.info
            elif not isinstance(said, Stopped):
                self.failed = said

    @property
    def is_over(self) -> bool:
        return self.failed is not None or self.code is not None

    @property
    def innocence(self) -> int:
        """The lower, the likelier this one was the first."""
        if self.failed is None:
            return 0 if self.code is not None and self.code < 0 else 1
        return 3 if self.failed.peer_lost else 2

    def error(self) -> WorkerError:
        name = f"tensor-parallel worker {self.rank}"
        if self.failed is None:
            assert self.code is not None
            return WorkerError(describe_exit(name, self.code))
        if self.failed.for_user:
            return WorkerError(self.failed.error)
        return WorkerError(f"the {name} process failed: {self.failed.error}")


def make_folder() -> Path:
    """Where the rings are: in memory if the system has such a place."""
    parent = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else None
    return Path(tempfile.mkdtemp(prefix="sglang-workers-", dir=parent))

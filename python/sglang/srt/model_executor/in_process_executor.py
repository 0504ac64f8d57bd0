"""An executor for one device: a thread that carries out plans in the order of their launch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue

from sglang.srt.model_executor.results import pack, unpack
from sglang.srt.model_executor.step_plan import ExecutorInfo, StepPlan, StepResult
from sglang.srt.model_executor.worker import Worker


class ExecutorStopped(RuntimeError):
    """A plan was launched after ``shutdown``."""


@dataclass(frozen=True, slots=True)
class _Launched:
    plan: StepPlan
    result: Future[StepResult]

    def wait(self) -> StepResult:
        """Blocks until the step is done; raises what the step raised."""
        return self.result.result()


class InProcessExecutor:
    """``launch`` hands the plan over and returns; ``wait`` gives its result or raises its error.

    The worker is assembled in the thread that will run it. OpenMP keeps a pool of threads for each
    thread that ever computed; with two pools there are more threads than cores, its barriers sleep
    instead of spinning, and a decode step of one row takes 1.4 times as long.
    """

    def __init__(self, assemble: Callable[[], tuple[Worker, ExecutorInfo]]) -> None:
        self._queue: SimpleQueue[_Launched | None] = SimpleQueue()
        self._stopped = False
        assembled: Future[tuple[Worker, ExecutorInfo]] = Future()
        # A daemon: a process whose main thread dies must not wait for plans that never come.
        self._thread = threading.Thread(
            target=self._serve, args=(assemble, assembled), name="executor", daemon=True
        )
        self._thread.start()
        worker, self._info = assembled.result()
        self.worker = worker  # for tests and benchmarks; between two steps only

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    def launch(self, plan: StepPlan) -> _Launched:
        if self._stopped:
            raise ExecutorStopped(f"step {plan.step_id} was launched after shutdown")
        launched = _Launched(plan, Future())
        self._queue.put(launched)
        return launched

    def shutdown(self) -> None:
        """Finish the steps launched and stop the thread. May be called again."""
        if not self._stopped:
            self._stopped = True
            self._queue.put(None)
        self._thread.join()

    def _serve(
        self,
        assemble: Callable[[], tuple[Worker, ExecutorInfo]],
        assembled: Future[tuple[Worker, ExecutorInfo]],
    ) -> None:
        try:
            assembled.set_result(assemble())
        except BaseException as error:  # the thread's edge: whoever builds the executor gets it
            assembled.set_exception(error)
            return
        failure: BaseException | None = None
        while (launched := self._queue.get()) is not None:
            if failure is None:
                try:
                    launched.result.set_result(self._run(launched.plan))
                    continue
                except BaseException as error:  # the thread's edge: whoever waits gets it
                    failure = error
            # After a failure the state is unknown: every later step fails with the same error.
            launched.result.set_exception(failure)

    def _run(self, plan: StepPlan) -> StepResult:
        began = time.perf_counter()
        output = self.worker.execute(plan)
        packed_cpu = None if output is None else pack(output).cpu()
        return unpack(plan, packed_cpu, time.perf_counter() - began)

"""An executor for one device: a thread that carries out plans in the order of their launch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from queue import SimpleQueue

import torch

from sglang.srt.model_executor.device_results import DeviceResults
from sglang.srt.model_executor.results import HostResults, StepResults
from sglang.srt.model_executor.step_plan import ExecutorInfo, StepPlan, StepResult
from sglang.srt.model_executor.worker import Worker


class ExecutorStopped(RuntimeError):
    """A plan was launched after ``shutdown``."""


class _DeviceFailure:
    """The error that a wait found; no step is good after it."""

    def __init__(self) -> None:
        self.error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class _Arrival:
    wait: Callable[[], StepResult]
    launch_time_s: float


@dataclass(frozen=True, slots=True)
class _Launched:
    plan: StepPlan
    arrival: Future[_Arrival]  # set when the step has been launched on the device
    failure: _DeviceFailure

    def wait(self) -> StepResult:
        """Blocks until the step is done; raises what the step raised, or one that was waited for before."""
        arrival = self.arrival.result()
        if self.failure.error is not None:
            raise self.failure.error
        try:
            return replace(arrival.wait(), launch_time_s=arrival.launch_time_s)
        except Exception as error:  # an edge: a device says what went wrong when it is waited for
            self.failure.error = error
            raise


def results_of(worker: Worker) -> StepResults:
    """The way results of the worker's device come to the host."""
    config = worker.config
    if config.device.type != "cuda":
        return HostResults()
    columns = (config.spec.num_steps if config.spec else 0) + 3  # tokens, count, valid ones
    return DeviceResults(config.num_slots * columns)


class InProcessExecutor:
    """``launch`` hands the plan over and returns; ``wait`` gives its result or raises its error.

    The worker is assembled in the thread that will run it. OpenMP keeps a pool of threads for each
    thread that ever computed; with two pools there are more threads than cores, its barriers sleep
    instead of spinning, and a decode step of one row takes 1.4 times as long. And the current CUDA
    stream is a thread's own.
    """

    def __init__(
        self,
        assemble: Callable[[], tuple[Worker, ExecutorInfo]],
        results_of: Callable[[Worker], StepResults] = results_of,
    ) -> None:
        self._queue: SimpleQueue[_Launched | None] = SimpleQueue()
        self._stopped = False
        self._failure = _DeviceFailure()
        self._results_of = results_of
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
        launched = _Launched(plan, Future(), self._failure)
        self._queue.put(launched)
        return launched

    def enter_thread(self) -> None:
        """For a thread that will wait for results: the current GPU is a thread's own, and waiting would take
        memory of the first one."""
        if self.worker.config.device.type == "cuda":
            torch.cuda.set_device(self.worker.config.device)

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
            worker, info = assemble()
            results = self._results_of(worker)
        except BaseException as error:  # the thread's edge: whoever builds the executor gets it
            assembled.set_exception(error)
            return
        assembled.set_result((worker, info))
        failure: BaseException | None = None
        while (launched := self._queue.get()) is not None:
            failure = failure or self._failure.error
            if failure is None:
                try:
                    began = time.perf_counter()
                    results.begin()
                    arrive = results.collect(launched.plan, worker.execute(launched.plan))
                    launched.arrival.set_result(_Arrival(arrive, time.perf_counter() - began))
                    continue
                except BaseException as error:  # the thread's edge: whoever waits gets it
                    failure = error
            # After a failure the state is unknown: every later step fails with the same error.
            launched.arrival.set_exception(failure)

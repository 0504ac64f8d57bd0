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
from sglang.srt.model_executor.executor import ExecutorStopped
from sglang.srt.model_executor.results import HostResults, StepResults
from sglang.srt.model_executor.step_plan import ExecutorInfo, StepDrafts, StepMidInput, StepPlan, StepResult
from sglang.srt.model_executor.worker import Worker


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
    arrived_drafts: Future[Callable[[], StepDrafts]]  # of a masked step: set when its first part has been

    def drafts(self) -> StepDrafts:
        """Blocks until they are known; raises what the step raised."""
        return self.arrived_drafts.result()()

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
    spec = config.spec
    columns = 3 if spec is None else max(spec.num_steps + 3, 2 * spec.num_draft_tokens)
    # Tokens, count and valid ones of a result; before it, tokens and parents of what a masked step verifies.
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
        self._queue: SimpleQueue[_Launched | StepMidInput | None] = SimpleQueue()
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
        launched = _Launched(plan, Future(), self._failure, Future())
        self._queue.put(launched)
        return launched

    def supply(self, masks: StepMidInput) -> None:
        self._queue.put(masks)

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
            if isinstance(launched, StepMidInput):
                continue  # of a step that has failed by then
            failure = failure or self._failure.error
            if failure is None:
                try:
                    arrival = self._launch(worker, results, launched)
                    if arrival is None:
                        step_id = launched.plan.step_id
                        launched.arrival.set_exception(ExecutorStopped(f"step {step_id} was not finished"))
                        return
                    launched.arrival.set_result(arrival)
                    continue
                except BaseException as error:  # the thread's edge: whoever waits gets it
                    failure = error
            # After a failure the state is unknown: every later step fails with the same error.
            launched.arrival.set_exception(failure)
            if not launched.arrived_drafts.done():
                launched.arrived_drafts.set_exception(failure)

    def _launch(self, worker: Worker, results: StepResults, launched: _Launched) -> _Arrival | None:
        """None: the end came in place of a masked step's masks."""
        plan = launched.plan
        began = time.perf_counter()
        results.begin()
        if not plan.masked:
            arrive = results.collect(plan, worker.execute(plan))
            return _Arrival(arrive, time.perf_counter() - began)
        begun = worker.begin(plan)
        launched.arrived_drafts.set_result(results.pause(plan, begun.drafts))
        took = time.perf_counter() - began
        masks = self._queue.get()
        if masks is None:
            return None
        assert isinstance(masks, StepMidInput), f"step {plan.step_id} got another plan instead of its masks"
        began = time.perf_counter()
        results.resume()
        arrive = results.collect(plan, worker.finish(plan, begun, masks))
        return _Arrival(arrive, took + time.perf_counter() - began)

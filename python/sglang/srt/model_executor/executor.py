"""The boundary between the scheduler and the devices."""

from __future__ import annotations

from typing import Protocol

from sglang.srt.model_executor.step_plan import ExecutorInfo, StepPlan, StepResult


class PendingStep(Protocol):
    """A step on its way. ``wait`` blocks until its result is on the host; called once."""

    def wait(self) -> StepResult: ...


class Executor(Protocol):
    """Carries out plans strictly in the order of ``launch``; ``launch`` does not block.

    The caller waits for pending steps in the same order. An exception inside a step is raised by
    its ``wait`` (and by that of every later step): the state is then unknown and the process ends.
    """

    @property
    def info(self) -> ExecutorInfo: ...

    def launch(self, plan: StepPlan) -> PendingStep: ...

    def shutdown(self) -> None: ...

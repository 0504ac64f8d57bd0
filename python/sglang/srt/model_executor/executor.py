"""The boundary between the scheduler and the devices."""

from __future__ import annotations

from typing import Protocol

from sglang.srt.model_executor.step_plan import ExecutorInfo, StepDrafts, StepMidInput, StepPlan, StepResult


class ExecutorStopped(RuntimeError):
    """A plan was launched after ``shutdown``, or the shutdown came before its masks."""


class PendingStep(Protocol):
    """A step on its way. ``wait`` blocks until its result is on the host; called once."""

    def drafts(self) -> StepDrafts:
        """Of a masked speculative step, before its ``StepMidInput`` is supplied; called once. Blocks."""
        ...

    def wait(self) -> StepResult: ...


class Executor(Protocol):
    """Carries out plans strictly in the order of ``launch``; ``launch`` does not block.

    The caller waits for pending steps in the same order. An exception inside a step is raised by
    its ``wait`` (and by that of every later step): the state is then unknown and the process ends.

    A *masked* plan is carried out in two parts: drafts and the target's forward when it is launched; the
    choices, and all that follows from them, when ``supply`` has given its masks. Nothing else is launched
    between.
    """

    @property
    def info(self) -> ExecutorInfo: ...

    def launch(self, plan: StepPlan) -> PendingStep: ...

    def supply(self, masks: StepMidInput) -> None:
        """For the step launched last, which is a masked one. Does not block."""
        ...

    def shutdown(self) -> None: ...

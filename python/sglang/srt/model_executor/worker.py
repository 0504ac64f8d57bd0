"""The single owner and writer of the device state of one device."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from sglang.srt.mem_cache.pool import KVPool
from sglang.srt.model_executor.accept import TokenRewriter
from sglang.srt.model_executor.agreement import Agreement
from sglang.srt.model_executor.config import WorkerConfig
from sglang.srt.model_executor.drafter import Drafter, PlanReader
from sglang.srt.model_executor.reporting import Reporter
from sglang.srt.model_executor.results import BegunStep, DraftNodes, Executed, pack
from sglang.srt.model_executor.slot_state import SlotState
from sglang.srt.model_executor.step import Forward, StepRunner
from sglang.srt.model_executor.step_graphs import DecodeSteps
from sglang.srt.model_executor.step_plan import StepKind, StepMidInput, StepPlan
from sglang.srt.sampling.logit_edits import LogitEditors
from sglang.srt.sampling.rows import choice_masks
from sglang.srt.sampling.sampler import StepSampler


class Worker:
    """Applies a plan: admissions, page writes, then the step."""

    def __init__(
        self,
        config: WorkerConfig,
        state: SlotState,
        sampler: StepSampler,
        pools: tuple[KVPool, ...],  # the target's, then the drafter's
        drafter: Drafter | None,
        runner: StepRunner,
        decode_steps: DecodeSteps | None = None,  # for plans without prefill; None: the runner takes all
        agreement: Agreement | None = None,  # checked after every step
        reader: PlanReader | None = None,
    ) -> None:
        self.config = config
        self.state = state
        self.sampler = sampler
        self.pools = pools
        self.drafter = drafter
        self._runner = runner
        self._decode_steps = decode_steps
        self._editors = LogitEditors()
        self._agreement = agreement
        self._reader = reader
        self._reporter = Reporter(runner.model, config.vocab_size)

    @property
    def simulated(self) -> TokenRewriter | None:
        """For benchmarks that change it, between two steps only."""
        return self._runner.simulated

    @property
    def decode_steps(self) -> DecodeSteps | None:
        """For benchmarks of steps that no plan asks for."""
        return self._decode_steps

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Executed | None:
        """Launch one plan; None for a plan without rows. Nothing is read back from the device."""
        executed = self._execute(plan)
        if self._agreement is not None:
            self._agreement.check(plan.step_id)
        return executed

    @torch.inference_mode()
    def begin(self, plan: StepPlan) -> BegunStep:
        """Launch a masked plan up to its choices."""
        assert plan.masked and plan.num_rows
        self._prepare(plan)
        if self._decode_steps is not None and not plan.prefill:
            editors = self._editors if self._editors.has_any(plan.decode_slots) else None
            begun = self._decode_steps.begin(plan.decode_slots, plan.draft_len, editors)
        else:
            begun = self._begin(plan, self._runner.forward(plan))
        self.sampler.admit(plan.admissions)
        return begun

    def _begin(self, plan: StepPlan, forward: Forward) -> BegunStep:
        tree = forward.batch.tree
        drafts = DraftNodes(tree.tokens, None if tree.mask is None else tree.parents)

        def finish(masks: StepMidInput) -> Executed:
            allowed = choice_masks(masks, self.state.device) if masks.rows else None
            edit = partial(self._editors.apply, masks.edits) if masks.edits else None
            output = self._runner.finish(plan, forward, allowed, edit)
            return Executed(pack(output), trace=output.trace)

        return BegunStep(drafts if plan.draft_len else None, finish)

    @torch.inference_mode()
    def finish(self, plan: StepPlan, begun: BegunStep, masks: StepMidInput) -> Executed:
        """Launch the rest of it."""
        assert masks.step_id == plan.step_id, f"masks of step {masks.step_id} for step {plan.step_id}"
        executed = self._with_report(plan, begun.finish(masks))
        if self._agreement is not None:
            self._agreement.check(plan.step_id)
        return executed

    def _prepare(self, plan: StepPlan) -> None:
        self._check(plan)
        self.state.admit(plan.admissions)
        if self.drafter is not None:
            self.drafter.admit(plan.admissions)
        self.state.write_pages(plan.page_writes)
        if self._reader is not None:
            self._reader.read(plan)
        self._editors.admit(plan.admissions)

    def _execute(self, plan: StepPlan) -> Executed | None:
        assert not plan.masked, "a masked plan is begun, then finished"
        self._prepare(plan)
        forward = None
        is_idle = plan.kind is StepKind.IDLE or plan.num_rows == 0
        if not is_idle and (self._decode_steps is None or plan.prefill):
            forward = self._runner.forward(plan)
        # Behind the forward: no decode row is a slot admitted now, and a prefill's launch is not held up.
        self.sampler.admit(plan.admissions)
        if is_idle:
            return None
        if forward is not None:
            output = self._runner.finish(plan, forward)
            return self._with_report(plan, Executed(pack(output), trace=output.trace))
        assert self._decode_steps is not None
        done = self._decode_steps.run(plan.decode_slots, plan.draft_len, plan.row_drafts)
        return self._with_report(plan, done)

    def _with_report(self, plan: StepPlan, executed: Executed) -> Executed:
        """Launched behind the step, only where the plan wishes it. Nobody else reads the trace, and whoever
        waits for the result would keep it."""
        if not plan.wishes:
            return executed if executed.trace is None else replace(executed, trace=None)
        assert executed.trace is not None
        return replace(executed, trace=None, report=self._reporter.report(plan, executed.trace))

    def _check(self, plan: StepPlan) -> None:
        """Broken plans are faults of the planner: die loudly rather than index something else."""
        spec = self.config.spec
        if plan.draft_len:
            assert spec is not None, f"step {plan.step_id}: drafts asked for, but there is no drafter"
            assert plan.draft_len <= spec.num_steps, f"step {plan.step_id}: draft_len {plan.draft_len}"
            assert len(plan.decode_slots) <= self.config.max_spec_rows, (
                f"step {plan.step_id}: {len(plan.decode_slots)} rows speculate,"
                f" at most {self.config.max_spec_rows} may"
            )
        used = plan.decode_slots + tuple(chunk.slot for chunk in plan.prefill)
        assert all(0 <= slot <= self.config.num_slots for slot in used), f"step {plan.step_id}: slots {used}"

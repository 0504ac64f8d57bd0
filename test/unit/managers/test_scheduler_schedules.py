"""Random schedules against the fake executor: whatever happens, nothing is lost and texts are right."""

from __future__ import annotations

import random

import pytest
from helpers.scheduler_harness import SchedulerHarness
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang.srt.model_executor.step_plan import GraphSet, SpecShape, StepCost
from sglang.srt.speculative.controller import AutoController
from sglang.srt.speculative.cost_table import CostTable
from sglang.srt.speculative.toggle import Decision, Policy, Reason, ToggleInput, decide_by_threshold

SPECS = (None, SpecShape(1), SpecShape(3), SpecShape(2, 4, 16), SpecShape(5, 4, 8))
PREFIXES = tuple([(7 * i + start) % 40 for i in range(24)] for start in range(3))


def random_modes(seed: int) -> Policy:
    """Any mode and any draft length that the step could have."""
    rng = random.Random(seed)

    def decide(state: ToggleInput) -> Decision:
        decision = decide_by_threshold(state)
        if decision.draft_len == 0:
            return decision
        return Decision(rng.randint(0, decision.draft_len), Reason.BATCH_SIZE)

    return decide


def any_costs(spec: SpecShape, seed: int) -> AutoController:
    """So that no length is the best for all numbers of rows."""
    rng = random.Random(seed)
    lens = range(spec.num_steps + 1)
    costs = [StepCost(k, rows, rng.uniform(0.001, 0.003), 1e-5) for k in lens for rows in range(1, 7)]
    own = ragged_sizes(spec)
    costs += [StepCost(k, size[0], rng.uniform(0.001, 0.002), 1e-5, size[1]) for k in own for size in own[k]]
    table = CostTable.from_costs(costs, padded=True)
    return AutoController(table, spec.num_steps, probe_fraction=0.1, num_slots=6 if own else 0)


def ragged_sizes(spec: SpecShape) -> dict[int, tuple[tuple[int, int], ...]]:
    """Of steps whose rows have draft lengths of their own: rows and tokens, by draft length."""
    if spec.topk > 1:
        return {}
    return {k: tuple((rows, rows * (k + 2) // 2) for rows in (2, 4, 6)) for k in range(1, spec.num_steps + 1)}


def graphs_of(spec: SpecShape | None, num_slots: int) -> tuple[GraphSet, ...]:
    if spec is None or not (own := ragged_sizes(spec)):
        return ()
    rows = tuple(range(1, num_slots + 1))
    return (GraphSet(0, rows, 0.0, 0), *(GraphSet(k, rows, 0.0, 0, own[k]) for k in own))


class Schedules(RuleBasedStateMachine):
    @initialize(
        spec=st.sampled_from(SPECS),
        page_size=st.sampled_from([1, 4, 16]),
        pool_tokens=st.sampled_from([64, 96, 160, 400]),
        num_slots=st.integers(1, 6),
        chunk=st.sampled_from([None, 1, 3, 8, 64]),
        mixed=st.booleans(),
        disable_overlap=st.booleans(),
        use_cache=st.booleans(),
        lazy=st.booleans(),
        flip_modes=st.booleans(),
        threshold=st.none() | st.integers(0, 6),
        reserve=st.sampled_from([1, 8, 64]),
        seed=st.integers(0, 10**6),
    )
    def start(
        self, spec, page_size, pool_tokens, num_slots, chunk, mixed, disable_overlap, use_cache, lazy,
        flip_modes, threshold, reserve, seed,
    ) -> None:  # fmt: skip
        self.harness = SchedulerHarness(
            spec=spec,
            num_slots=num_slots,
            num_pages=pool_tokens // page_size,
            page_size=page_size,
            context_len=72,
            policy=random_modes(seed) if flip_modes else decide_by_threshold,
            use_cache=use_cache,
            lazy=lazy,
            seed=seed,
            chunked_prefill_size=chunk,
            max_prefill_tokens=48,
            enable_mixed_chunk=mixed,
            disable_overlap=disable_overlap,
            speculative_disable_bs_threshold=threshold if spec else None,
            decode_reserve_tokens=reserve,
            max_queued_requests=20,
            decode_log_interval=5,
            auto=any_costs(spec, seed) if spec else None,
            graphs=graphs_of(spec, num_slots) if seed % 2 else (),
        )
        self.page_size = page_size

    @rule(
        prefix=st.sampled_from(PREFIXES),
        prefix_len=st.integers(0, 24),
        tail=st.lists(st.integers(0, 39), min_size=1, max_size=6),
        max_new=st.none() | st.integers(1, 30),
        stop=st.sampled_from([(), (), ("aa",), ("hbb", "ccc"), ("fgf",)]),
        stop_ids=st.sampled_from([(), (), (5, 11)]),
        ignore_eos=st.booleans(),
        min_new=st.sampled_from([0, 0, 1, 6]),
        cap=st.sampled_from([None, None, 0, 1]),
        stream=st.booleans(),
        interval=st.sampled_from([None, 1, 4]),
        seed=st.integers(0, 3),
        copies=st.integers(1, 3),
    )
    def send(
        self, prefix, prefix_len, tail, max_new, stop, stop_ids, ignore_eos, min_new, cap, stream, interval,
        seed, copies,
    ) -> None:  # fmt: skip
        for copy in range(copies):
            self.harness.send(
                prefix[:prefix_len] + tail,
                stream=stream,
                max_new_tokens=max_new,
                stop=stop,
                stop_token_ids=stop_ids,
                ignore_eos=ignore_eos,
                min_new_tokens=min(min_new, max_new or min_new),
                speculative_draft_len=cap,
                stream_interval=interval,
                sampling_seed=seed + copy,
                no_stop_trim=seed == 2,
            )

    @rule(count=st.integers(1, 12))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.harness.step()

    @precondition(lambda self: self.harness.sent)
    @rule(data=st.data())
    def abort_one(self, data: st.DataObject) -> None:
        self.harness.abort(data.draw(st.sampled_from(sorted(self.harness.sent))))

    @rule()
    def abort_all(self) -> None:
        self.harness.abort_all()

    @precondition(lambda self: self.harness.info.spec)
    @rule(threshold=st.none() | st.integers(0, 6))
    def change_threshold(self, threshold: int | None) -> None:
        reply = self.harness.set_state(speculative_disable_bs_threshold=threshold)
        assert reply.ok == (threshold is None or threshold <= self.harness.info.max_spec_rows)

    @precondition(lambda self: self.harness.info.spec)
    @rule()
    def choose_by_costs(self) -> None:
        assert self.harness.set_state(speculative_disable_bs_threshold="auto").ok

    @precondition(lambda self: self.harness.info.spec)
    @rule(lens=st.lists(st.integers(0, 3), min_size=4, max_size=4))
    def follow_a_schedule(self, lens: list[int]) -> None:
        most = self.harness.info.spec.num_steps
        one, two, few, many = (min(length, most) for length in lens)
        schedule = f"1-1:{one},2-2:{two},3-4:{few},5-:{many}"
        assert self.harness.set_state(speculative_bs_schedule=schedule).ok

    @rule()
    def flush(self) -> None:
        idle = self.harness.scheduler.table.is_empty
        assert self.harness.flush_cache().ok == idle

    @rule(slot=st.integers(1, 6))
    def break_a_row(self, slot: int) -> None:
        live = [request.slot for request in self.harness.scheduler.table.running()]
        if slot in live:
            self.harness.executor.fault_slots.append(slot)

    @invariant()
    def every_page_has_one_owner(self) -> None:
        if hasattr(self, "harness"):
            self.harness.check_ownership()

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        self.harness.run()
        self.harness.check_end()
        self.harness.executor.shutdown()
        for rid, answer in self.harness.answers.items():
            self._check_abort(rid, answer)

    def _check_abort(self, rid: str, answer) -> None:
        if answer.finish.type != "abort":
            return
        message, status = answer.finish.message, answer.finish.status_code
        known = len(self.harness.sent[rid].input_ids) + len(answer.ids)
        if status is None:
            assert message == "aborted by the client"
        elif status == 503:
            assert "20" in message and not answer.ids
        elif "cannot grow" in message:
            assert -(-known // self.page_size) > self.harness.info.num_pages
        else:
            assert status == 500 and "not finite" in message


class TestSchedules(Schedules.TestCase):
    settings = settings(
        max_examples=120,
        stateful_step_count=25,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        database=None,
    )


@pytest.mark.long
class TestManySchedules(Schedules.TestCase):
    settings = settings(
        max_examples=3000,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )

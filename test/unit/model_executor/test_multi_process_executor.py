"""Workers of several ranks: what they are told, what comes back, and how they end. The workers are fakes.

Run alone: pytest THIS_FILE
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers.server import server_environment
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.model_executor.multi_process_executor import MultiProcessExecutor, WorkerError
from sglang.srt.model_executor.rank_messages import (
    decode_drafts,
    decode_masks,
    decode_plan,
    decode_result,
    encode,
)
from sglang.srt.model_executor.step_plan import (
    PageWrite,
    PrefillChunk,
    SlotAdmission,
    SlotSampling,
    StepDrafts,
    StepKind,
    StepMidInput,
    StepPlan,
    StepResult,
)
from sglang.srt.utils.child_process import Child, start_child

TESTS = Path(__file__).resolve().parents[2]
PARENT = """
import json, time
from sglang.srt.model_executor.multi_process_executor import MultiProcessExecutor
from sglang.srt.utils.child_process import start_child

def start(rank, folder):
    config = json.dumps({"folder": str(folder), "rank": rank, "size": 2}).encode()
    child = start_child(f"worker {rank}", "helpers.fake_rank", config, kill_with_parent=False)
    print(child.process.pid, end=" ")
    if rank == 1:
        print(folder, flush=True)
    return child

executor = MultiProcessExecutor(2, start, print)
print("started", flush=True)
time.sleep(60)
"""
PEER_LOST = {"error": "connection closed", "peer_lost": True}


class Executor:
    """With fakes that are configured by rank; what it said when one failed."""

    def __init__(self, size: int, by_rank: dict[int, dict[str, Any]]) -> None:
        self.failures: list[str] = []
        self.folder = Path()

        def start(rank: int, folder: Path) -> Child:
            self.folder = folder
            config = {"folder": str(folder), "rank": rank, "size": size} | by_rank.get(rank, {})
            return start_child(
                f"worker {rank}",
                "helpers.fake_rank",
                json.dumps(config).encode(),
                kill_with_parent=False,
                environ={"PYTHONPATH": str(TESTS)},
            )

        self.inner = MultiProcessExecutor(size, start, self.failures.append)

    def step(self, step_id: int, slots: tuple[int, ...] = (1, 2)) -> StepResult:
        return self.inner.launch(plan_of(step_id, slots)).wait()

    def fail(self, step_id: int) -> str:
        """The error of a step, which the callback had too; all workers are gone by then."""
        with pytest.raises(WorkerError) as caught:
            self.step(step_id)
        deadline = time.monotonic() + 5
        while not self.failures and time.monotonic() < deadline:
            time.sleep(0.01)
        assert self.failures == [str(caught.value)]
        assert all(child.exit_code() is not None for child in self.inner.children)
        assert not self.folder.exists()
        self.inner.shutdown()
        return self.failures[0]


def plan_of(step_id: int, slots: tuple[int, ...]) -> StepPlan:
    return StepPlan(step_id, StepKind.DECODE, slots, (5,) * len(slots))


def test_results_come_in_order_and_the_end_is_clean() -> None:
    executor = Executor(3, {})
    inner = executor.inner
    assert inner.info.num_slots == 4 and inner.info.weight_bytes == 0  # rank 0's
    pending = [inner.launch(plan_of(i, (i % 4 + 1,))) for i in range(20)]
    assert [(r.step_id, r.tokens) for r in (p.wait() for p in pending)] == [
        (i, ((i % 4 + 1,),)) for i in range(20)
    ]
    inner.shutdown()
    inner.shutdown()
    assert [child.exit_code() for child in inner.children] == [0, 0, 0]
    assert executor.failures == [] and not executor.folder.exists()


def test_masked_steps_among_others() -> None:
    """Larger than the ring are the masks of one of them."""
    executor = Executor(2, {})
    inner = executor.inner
    for step_id in range(6):
        before = inner.launch(plan_of(10 * step_id, (1, 2)))
        masked = replace(plan_of(10 * step_id + 1, (3, 4)), masked=True, draft_len=step_id % 2)
        pending = inner.launch(masked)
        assert before.wait().tokens == ((1,), (2,))
        if masked.draft_len:
            assert pending.drafts() == StepDrafts(masked.step_id, ((3,), (4,)))
        masks = bytes([7, 8]) if step_id < 5 else bytes(6_000_000)
        inner.supply(StepMidInput(masked.step_id, (0, 1), 1, memoryview(masks)))
        assert pending.wait().tokens == tuple((token,) for token in masks[:100])
    pending = inner.launch(replace(plan_of(99, (1,)), masked=True))
    inner.shutdown()  # and the masks never come


@pytest.mark.parametrize(
    "by_rank, words",
    [
        (
            {0: {"how": 1, "after_s": 9}, 1: {"how": "SIGKILL"}},
            "the tensor-parallel worker 1 process was killed by SIGKILL",
        ),
        ({0: {"how": 7}}, "the tensor-parallel worker 0 process ended with exit code 7"),
        (
            {0: {"how": PEER_LOST}, 1: {"how": "SIGKILL", "after_s": 0.1}},
            "the tensor-parallel worker 1 process was killed by SIGKILL",
        ),
        (
            {0: {"how": PEER_LOST}, 1: {"how": {"error": "ranks disagree"}, "after_s": 0.1}},
            "the tensor-parallel worker 1 process failed: ranks disagree",
        ),
    ],
)
def test_the_worker_to_blame_is_named(by_rank: dict[int, dict[str, Any]], words: str) -> None:
    executor = Executor(2, {rank: {"fails_at": 2, **how} for rank, how in by_rank.items()})
    executor.step(1)
    began = time.monotonic()
    assert executor.fail(2) == words
    assert time.monotonic() - began < 3


def test_a_worker_that_dies_while_nobody_waits_is_noticed() -> None:
    executor = Executor(2, {})
    os.kill(executor.inner.children[1].process.pid, signal.SIGTERM)
    deadline = time.monotonic() + 5
    while not executor.failures and time.monotonic() < deadline:
        time.sleep(0.01)
    assert executor.failures == ["the tensor-parallel worker 1 process was killed by SIGTERM"]
    executor.inner.shutdown()


def test_an_error_for_the_user_is_told_as_it_is() -> None:
    with pytest.raises(WorkerError, match="^no such model$"):
        Executor(
            2, {1: {"at_start": {"error": "no such model", "for_user": True}}, 0: {"at_start": PEER_LOST}}
        )


def test_a_killed_parent_leaves_nothing_behind(tmp_path: Path) -> None:
    env = server_environment(tmp_path)
    env["PYTHONPATH"] += f"{os.pathsep}{TESTS}"
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, env=env, text=True)
    assert parent.stdout is not None
    *pids, folder = parent.stdout.readline().split()
    assert parent.stdout.readline() == "started\n"
    workers = [psutil.Process(int(pid)) for pid in pids]
    assert len(workers) == 2 and Path(folder).exists()
    parent.kill()
    parent.wait()
    gone, alive = psutil.wait_procs(workers, timeout=5)
    assert not alive and len(gone) == 2
    assert not Path(folder).exists()
    parent.stdout.close()


IDS = st.lists(st.integers(0, 2**31), max_size=5).map(tuple)
SAMPLING = st.builds(
    SlotSampling,
    temperature=st.floats(0, 2),
    top_k=st.integers(-1, 100),
    suppressed_ids=IDS,
    logit_bias=st.lists(st.tuples(st.integers(0, 9), st.floats(-5, 5)), max_size=3).map(tuple),
    seed=st.integers(-(2**63), 2**64 - 1),
    draft_cap=st.none() | st.integers(0, 5),
)
ADMISSIONS = st.lists(
    st.builds(SlotAdmission, st.integers(1, 9), st.integers(1, 9), st.integers(0, 9), SAMPLING, IDS),
    max_size=3,
).map(tuple)


@given(
    admissions=ADMISSIONS,
    writes=st.lists(st.builds(PageWrite, st.integers(1, 9), st.integers(0, 9), IDS), max_size=3).map(tuple),
    chunks=st.lists(
        st.builds(PrefillChunk, st.integers(1, 9), st.integers(0, 9), IDS, st.none() | st.integers(0, 9)),
        max_size=3,
    ).map(tuple),
    slots=IDS,
    masked=st.booleans(),
)
def test_plans_arrive_as_they_were(
    admissions: tuple[SlotAdmission, ...],
    writes: tuple[PageWrite, ...],
    chunks: tuple[PrefillChunk, ...],
    slots: tuple[int, ...],
    masked: bool,
) -> None:
    plan = StepPlan(
        3,
        StepKind.MIXED,
        slots,
        slots,
        prefill=chunks,
        admissions=admissions,
        page_writes=writes,
        masked=masked,
    )
    assert decode_plan(encode(plan)) == plan


@given(
    rows=IDS,
    num_nodes=st.integers(1, 4),
    masks=st.binary(max_size=200),
    tokens=st.lists(IDS, max_size=3).map(tuple),
    is_tree=st.booleans(),
)
def test_what_a_masked_step_waits_for_arrives_as_it_was(
    rows: tuple[int, ...], num_nodes: int, masks: bytes, tokens: tuple[tuple[int, ...], ...], is_tree: bool
) -> None:
    supplied = StepMidInput(3, rows, num_nodes, memoryview(masks))
    assert decode_masks(encode(supplied)) == supplied
    drafts = StepDrafts(3, tokens, tokens if is_tree else None)
    assert decode_drafts(encode(drafts)) == drafts


@given(st.lists(IDS, max_size=4).map(tuple), st.floats(0, 1), st.sampled_from([None, True, False]))
def test_results_arrive_as_they_were(
    tokens: tuple[tuple[int, ...], ...], seconds: float, graph: bool | None
) -> None:
    result = StepResult(4, tokens, tuple(len(t) > 2 for t in tokens), seconds, graph, seconds)
    assert decode_result(encode(result)) == result

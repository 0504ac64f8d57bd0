"""The state is told while the scheduler waits for the device. Run alone: pytest THIS_FILE"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.fake_executor import FakePending
from helpers.scheduler_harness import SchedulerHarness

from sglang.srt.managers.io_struct import (
    ControlReply,
    GenerateRequest,
    GetStateRequest,
    SetStateRequest,
    TokenBatch,
    encode,
    tokenizer_decoder,
)
from sglang.srt.managers.state_answers import answer_states, state_endpoint
from sglang.srt.model_executor.step_plan import SpecShape, StepResult
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.ipc import Receiver, Sender, endpoint


class Asker:
    """What the server's first process has."""

    def __init__(self, folder: Path) -> None:
        self._receiver = Receiver(endpoint(folder, "tokenizer"), tokenizer_decoder.decode)
        self._sender = Sender(state_endpoint(folder), encode)

    def ask(self, request_id: str) -> ControlReply:
        self._sender.send(GetStateRequest(request_id))
        assert self._receiver.wait(5.0), "no answer"
        (reply,) = self._receiver.receive_all()
        assert isinstance(reply, ControlReply) and reply.ok and reply.request_id == request_id
        return reply

    def close(self) -> None:
        self._sender.close()
        self._receiver.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    """Shorter than ``tmp_path``, which a socket's path can't hold."""
    with tempfile.TemporaryDirectory(prefix="t") as path:
        yield Path(path)


def test_the_state_is_told_while_a_step_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits, goes_on = threading.Event(), threading.Event()
    wait = FakePending.wait

    def wait_long(pending: FakePending) -> StepResult:
        waits.set()
        assert goes_on.wait(20)
        return wait(pending)

    harness = SchedulerHarness(spec=SpecShape(3), speculative_disable_bs_threshold=2)
    asker = Asker(folder)
    answer_states(folder, lambda: harness.scheduler.state, harness.scheduler.live)
    assert asker.ask("idle").body["num_running_reqs"] == 0
    harness.send([1, 2, 3], max_new_tokens=30)
    assert asker.ask("queued").body["num_queue_reqs"] == 1
    harness.step()
    monkeypatch.setattr(FakePending, "wait", wait_long)
    loop = threading.Thread(target=harness.scheduler.step)
    loop.start()
    try:
        assert waits.wait(20)
        body = asker.ask("busy").body
        assert loop.is_alive()
    finally:
        goes_on.set()
        loop.join()
    assert (body["num_running_reqs"], body["decode_steps"]) == (1, {"plain": 0, "spec": 0})
    assert body["speculative_disable_bs_threshold"] == 2
    harness.run()
    assert asker.ask("end").body["decode_steps"]["spec"] > 0
    asker.close()


class NotingHarness(SchedulerHarness):
    """Notes the speculative steps in the state and those in the answer when an answer leaves."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []
        super().__init__(spec=SpecShape(3))

    def _collect(self, batch: TokenBatch) -> None:
        super()._collect(batch)
        in_state = self.scheduler.state["decode_steps"]["spec"]
        self.seen.append((in_state, batch.outputs[0].stats.decode_steps_spec))


def test_who_has_the_answer_finds_it_in_the_state() -> None:
    harness = NotingHarness()
    harness.send([1, 2, 3], max_new_tokens=30, stream=True)
    harness.run()
    assert len(harness.seen) > 3
    assert all(in_state == in_answer for in_state, in_answer in harness.seen)


def test_a_change_is_in_the_state_when_it_is_confirmed() -> None:
    harness = SchedulerHarness(spec=SpecShape(3), speculative_disable_bs_threshold=4)
    thresholds: list[int] = []
    harness.scheduler._send_reply = lambda reply: thresholds.append(
        harness.scheduler.state["speculative_disable_bs_threshold"]
    )
    harness.scheduler.receive(SetStateRequest("set", {"speculative_disable_bs_threshold": 1}))
    assert thresholds == [1]


def test_a_change_on_an_idle_server_comes_after_all_its_steps() -> None:
    """Who changes the threshold and looks at the figures must not find steps of before in those of after."""
    harness = SchedulerHarness(spec=SpecShape(3))
    params = SamplingParams(max_new_tokens=60, sampling_seed=1, ignore_eos=True)
    ids, _, _ = harness.alone(GenerateRequest("", [1, 2, 3, 4], params, False, 0.0))
    rid = harness.send([1, 2, 3, 4], max_new_tokens=40, stop_token_ids=(ids[9],))
    while harness.answers.get(rid) is None:
        harness.step()
    assert harness.scheduler.has_work  # a step that nobody needs is on its way
    harness.set_state(speculative_disable_bs_threshold=0)
    assert not harness.scheduler.has_work
    settled = harness.state()["decode_steps"]
    harness.run()
    assert harness.state()["decode_steps"] == settled
    harness.check_end()

"""A dead server, a busy one, and one that stands still. Run alone: pytest THIS_FILE"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_tokenizer import write_byte_tokenizer

from sglang.srt.entrypoints.health import Health
from sglang.srt.managers.io_struct import (
    AbortRequest,
    ContinueRequest,
    ControlReply,
    GenerateRequest,
    GetStateRequest,
    PauseRequest,
    RequestStats,
    TextBatch,
    TextOutput,
)
from sglang.srt.managers.text_observers import Observers
from sglang.srt.managers.text_request import RequestError, TextRequest
from sglang.srt.managers.tokenizer_manager import Limits, TokenizerManager
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.text_tokenizer import TextTokenizer


class Engine:
    """Answers as a scheduler would, or does not."""

    def __init__(self, folder: Path) -> None:
        tokenizer = TextTokenizer.from_folder(write_byte_tokenizer(folder))
        self.manager = TokenizerManager(tokenizer, Limits(32, 1000, 256), self.take, Observers(), 1)
        self.answers_states = True
        self.generates = True
        self.turns_go_on = True
        self.turns = 0
        self.turn_s = 0.0
        self.sent: list[Any] = []

    def take(self, message: Any) -> None:
        self.sent.append(message)
        asyncio.get_running_loop().call_soon(self.answer, message)

    def answer(self, message: Any) -> None:
        if isinstance(message, GetStateRequest) and self.answers_states:
            self.turns += self.turns_go_on
            body = {"loop_turns": self.turns, "loop_turn_s": self.turn_s}
            self.manager.receive(ControlReply(message.request_id, ok=True, body=body))
        elif isinstance(message, PauseRequest | ContinueRequest):
            self.manager.receive(ControlReply(message.request_id, ok=True))
        elif isinstance(message, GenerateRequest) and self.generates:
            self.manager.receive(TextBatch([TextOutput(message.rid, "a", [97], RequestStats(1, 1, 0))]))

    def aborted(self) -> set[str]:
        return {message.rid for message in self.sent if isinstance(message, AbortRequest)}

    def started(self) -> set[str]:
        return {message.rid for message in self.sent if isinstance(message, GenerateRequest)}


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path)


def check(engine: Engine, work: Callable[[Health], Awaitable[bool]]) -> bool:
    async def run() -> bool:
        return await asyncio.wait_for(work(Health(engine.manager, 5.0, answer_s=0.1)), 10)

    return asyncio.run(run())


def alive(engine: Engine) -> bool:
    return check(engine, lambda health: health.is_alive())


def generating(engine: Engine) -> bool:
    ok = check(engine, lambda health: health.is_generating(0.12))
    assert engine.aborted() == engine.started(), "a probe is left"
    return ok


def test_a_server_that_works(engine: Engine) -> None:
    assert alive(engine) and generating(engine)


def test_a_long_step_is_no_death_but_an_endless_one_is(engine: Engine) -> None:
    engine.generates, engine.turn_s = False, 4.9
    assert alive(engine) and generating(engine)  # no token, and yet steps end
    engine.turns_go_on, engine.turn_s = False, 5.1
    assert not alive(engine) and not generating(engine)


def test_a_stopped_process(engine: Engine) -> None:
    engine.answers_states = False
    assert not alive(engine) and not generating(engine)
    assert not engine.manager._replies  # nobody waits for them any more


def test_a_server_that_ends_takes_no_more(engine: Engine) -> None:
    engine.manager.closing = "closing"
    assert not alive(engine) and not generating(engine)
    engine.manager.closing = None
    engine.manager.fail("dead")
    assert not alive(engine) and not generating(engine)


def test_a_paused_server_lives_and_lets_requests_wait(engine: Engine) -> None:
    async def run() -> None:
        manager = engine.manager
        await manager.pause("in_place")
        health = Health(manager, 5.0)
        assert await health.is_generating(0.1) and await health.is_alive()
        request = TextRequest("hi", SamplingParams(max_new_tokens=1), "r")
        waiting = asyncio.ensure_future(manager.submit([request]))
        await asyncio.sleep(0.05)
        assert not waiting.done() and "r" not in engine.started()
        await manager.resume()
        await waiting
        assert "r" in engine.started()
        await manager.pause("abort")
        assert any(isinstance(message, AbortRequest) and message.abort_all for message in engine.sent)
        waiting = asyncio.ensure_future(manager.submit([request]))
        await asyncio.sleep(0.01)
        manager.fail("dead", 503)
        with pytest.raises(RequestError, match="dead"):
            await waiting

    asyncio.run(run())

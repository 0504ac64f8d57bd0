"""Health that tells a dead server from a busy one.

/health asks the scheduler's process, which answers beside its loop; it is bad if no answer comes, or if the
step that runs has taken longer than the watchdog allows. /health_generate asks for a token: on a busy server
any request's will do, and where none came (long prompts, a queue) a step that has ended.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any, Final

from fastapi import APIRouter
from starlette.responses import Response

from sglang.srt.managers.text_observers import HEALTH_RID
from sglang.srt.managers.text_request import RequestError, TextRequest
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.sampling.sampling_params import SamplingParams

_ANSWER_TIMEOUT_S: Final = 10.0
_GENERATE_TIMEOUT_S: Final = 20.0
_POLL_S: Final = 0.05


class Health:
    def __init__(
        self, manager: TokenizerManager, watchdog_s: float, answer_s: float = _ANSWER_TIMEOUT_S
    ) -> None:
        """``watchdog_s`` 0: a step may take any time."""
        self._manager = manager
        self._watchdog_s = watchdog_s
        self._answer_s = answer_s

    async def is_alive(self) -> bool:
        """Whether requests sent now will be served in the end."""
        state = await self._state()
        if state is None or self._manager.closing is not None:
            return False
        turn_s = float(state.get("loop_turn_s", 0.0))
        return not self._watchdog_s or turn_s <= self._watchdog_s

    async def is_generating(self, timeout_s: float = _GENERATE_TIMEOUT_S) -> bool:
        if self._manager.is_paused or self._manager.closing is not None:
            return await self.is_alive()
        before = await self._state()
        if before is None:
            return False
        if await generates(self._manager, timeout_s):
            return True
        after = await self._state()
        return after is not None and after.get("loop_turns", 0) > before.get("loop_turns", 0)

    async def _state(self) -> dict[str, Any] | None:
        try:
            return await asyncio.wait_for(self._manager.get_state(), self._answer_s)
        except (TimeoutError, RequestError):
            return None


def health_router(manager: TokenizerManager, watchdog_s: float) -> APIRouter:
    router = APIRouter()
    health = Health(manager, watchdog_s)

    @router.get("/")
    @router.get("/health")
    @router.get("/ready")
    @router.get("/ping")
    async def alive() -> Response:
        return Response(status_code=200 if await health.is_alive() else 503)

    @router.get("/health_generate")
    async def generating() -> Response:
        return Response(status_code=200 if await health.is_generating() else 503)

    return router


async def generates(manager: TokenizerManager, timeout_s: float) -> bool:
    """Whether a token comes out: of a request of its own, or, on a busy server, of any other."""
    asked_ts = time.time()
    rid = f"{HEALTH_RID}_{uuid.uuid4().hex}"
    probe = TextRequest([0], SamplingParams(max_new_tokens=1, temperature=0.0), rid, log_metrics=False)
    try:
        group = await manager.submit([probe])
    except RequestError:
        return False
    while time.time() < asked_ts + timeout_s:
        if manager.last_output_ts >= asked_ts:
            # A full queue answers the probe too, with a refusal: then others are being served.
            manager.abort_group(group, "the health check has its answer")
            return manager.failure is None
        await asyncio.sleep(_POLL_S)
        if manager.failure is not None:
            return False
    manager.abort_group(group, "the health check has waited long enough")
    return False

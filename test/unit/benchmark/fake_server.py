"""A small HTTP server with the answers that the benchmark scripts read; it generates nothing.

Runs as a program (only ``--port``, ``--no-drafter`` and ``--foreign`` count of its arguments), so that
`servers.py` can start it. Every stream emits three tokens an event while at most ``THRESHOLD`` streams run,
one otherwise. A foreign one has nothing but OpenAI's chat endpoint.
"""

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse, StreamingResponse

THRESHOLD = 4
STEP_SECONDS = 0.005
DRAFTS = 3


class FakeState:
    """What the fake server counts."""

    def __init__(self, threshold: int | str | None) -> None:
        self.threshold = threshold  # "auto" is that of THRESHOLD
        self.running = 0
        self.steps = {"plain": 0, "spec": 0}
        self.draft_len = 0
        self.switches = 0

    def step(self) -> int:
        """Count one step of one stream; return the tokens it gives."""
        limits = {None: self.running, "auto": THRESHOLD}
        limit = limits.get(self.threshold, self.threshold)
        draft_len = DRAFTS if self.running <= limit else 0
        self.switches += draft_len != self.draft_len
        self.draft_len = draft_len
        self.steps["spec" if draft_len else "plain"] += 1
        return draft_len or 1


def build_app(threshold: int) -> FastAPI:
    """Return the server."""
    app = FastAPI()
    state = FakeState(threshold)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {}

    @app.post("/set_internal_state")
    async def set_internal_state(body: dict[str, Any]) -> dict[str, bool]:
        state.threshold = body["server_args"]["speculative_disable_bs_threshold"]
        return {"updated": True}

    @app.get("/server_info")
    async def server_info() -> dict[str, Any]:
        internal = {
            "speculative_disable_bs_threshold": state.threshold,
            "spec_draft_len": state.draft_len,
            "decode_steps": dict(state.steps),
            "spec_switches": state.switches,
            "avg_spec_accept_length": float(DRAFTS),
        }
        return {"internal_states": [internal], "speculative_num_steps": DRAFTS}

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        gauge = "sglang:num_running_reqs"
        return PlainTextResponse(f'# TYPE {gauge} gauge\n{gauge}{{tp_rank="0"}} {float(state.running)}\n')

    @app.post("/flush_cache")
    async def flush_cache() -> PlainTextResponse:
        return PlainTextResponse("Cache flushed.")

    @app.post("/generate")
    async def generate(body: dict[str, Any]) -> StreamingResponse:
        wanted = int(body["sampling_params"]["max_new_tokens"])
        return StreamingResponse(_events(state, wanted), media_type="text/event-stream")

    return app


def build_foreign_app() -> FastAPI:
    """Return a server of another make: plain steps, and no account of itself."""
    app = FastAPI()
    state = FakeState(0)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"data": [{"id": "foreign-model"}]}

    @app.post("/v1/chat/completions")
    async def chat(body: dict[str, Any]) -> StreamingResponse:
        assert body["model"] == "foreign-model" and body["messages"][-1]["role"] == "user"
        return StreamingResponse(_chunks(state, int(body["max_tokens"])), media_type="text/event-stream")

    return app


async def _chunks(state: FakeState, wanted: int) -> AsyncIterator[str]:
    """The same stream as OpenAI has it, without counts of tokens but at the end."""
    tokens = 0
    async for event in _events(state, wanted):
        if not event.startswith("data: {"):
            continue
        meta = json.loads(event[6:])["meta_info"]
        tokens = meta["completion_tokens"]
        finish = meta["finish_reason"] and "length"
        choice = {"delta": {"content": "x"}, "finish_reason": finish}
        yield f"data: {json.dumps({'choices': [choice], 'usage': None})}\n\n"
    yield f"data: {json.dumps({'choices': [], 'usage': {'completion_tokens': tokens}})}\n\n"
    yield "data: [DONE]\n\n"


async def _events(state: FakeState, wanted: int) -> AsyncIterator[str]:
    count = 1
    spec_steps = plain_steps = 0
    state.running += 1
    try:
        while True:
            finish = {"type": "length", "length": wanted} if count >= wanted else None
            meta: dict[str, Any] = {"completion_tokens": count, "finish_reason": finish}
            if finish:
                meta |= {"decode_steps_plain": plain_steps, "decode_steps_spec": spec_steps}
            if finish and spec_steps:
                meta |= {"spec_verify_ct": spec_steps, "spec_accept_length": float(DRAFTS)}
            yield f"data: {json.dumps({'text': '', 'output_ids': list(range(count)), 'meta_info': meta})}\n\n"
            if finish:
                break
            await asyncio.sleep(STEP_SECONDS)
            gained = state.step()
            spec_steps += gained > 1
            plain_steps += gained == 1
            count = min(wanted, count + gained)
        yield "data: [DONE]\n\n"
    finally:
        state.running -= 1


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--no-drafter", action="store_true")
    parser.add_argument("--foreign", action="store_true")
    arguments = parser.parse_known_args()[0]
    app = build_foreign_app() if arguments.foreign else build_app(0 if arguments.no_drafter else THRESHOLD)
    uvicorn.run(app, host="127.0.0.1", port=arguments.port, log_level="warning")


if __name__ == "__main__":
    main()

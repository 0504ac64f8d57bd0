"""The HTTP application with a scheduler that answers by a script: what clients see of a known reply."""

from __future__ import annotations

import asyncio
import json
import time
from array import array
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx2
from helpers.tiny_models import BASE_CONFIG
from helpers.tiny_tiktoken import write_tiny_kimi

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.entrypoints.body_sends import BodySends
from sglang.srt.entrypoints.context import ServerContext
from sglang.srt.entrypoints.http_server import build_app
from sglang.srt.managers.chat_templates import load_chat_template
from sglang.srt.managers.io_struct import (
    AbortRequest,
    FinishReason,
    GenerateRequest,
    RequestStats,
    TextBatch,
    TextOutput,
    TokenReport,
)
from sglang.srt.managers.text_observers import Observers
from sglang.srt.managers.tokenizer_manager import Limits, TokenizerManager
from sglang.srt.model_executor.step_plan import Logprobs, Vectors
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.text_tokenizer import TextTokenizer

T = TypeVar("T")

TEMPLATES = Path(__file__).resolve().parent / "chat_templates"
URL = "/v1/chat/completions"


class ChatDesk:
    """``pieces`` is the reply to every request, ``finish`` how it ends; ``sent`` what the scheduler got."""

    def __init__(self, folder: Path, template: str = "kimi.jinja", **args: Any) -> None:
        write_tiny_kimi(folder)
        (folder / "chat_template.jinja").write_text((TEMPLATES / template).read_text())
        config = BASE_CONFIG | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        (folder / "config.json").write_text(json.dumps(config))
        self.tokenizer = TextTokenizer.from_folder(folder)
        self.pieces: list[str] = []
        self.held_at: int | None = None  # the piece that waits until this is another, or for an abort
        self._aborted: set[str] = set()
        self.finish = FinishReason("stop", matched=7)
        self.cached_tokens = 0
        self.sent: list[GenerateRequest] = []
        self.manager = TokenizerManager(
            self.tokenizer, Limits(4096, 9999, self.tokenizer.vocab_size, 2), self._take, Observers(), 1
        )
        context = ServerContext(
            args=ServerArgs(served_model_name="m", **args),
            model=ModelConfig.from_folder(folder, None),
            manager=self.manager,
            chat_template=load_chat_template(self.tokenizer, None),
            launch_command="",
            started_ts=time.time(),
            startup_time_s=0.0,
        )
        self.app = BodySends(build_app(context))  # as a server serves it
        self._answers: set[asyncio.Task[None]] = set()

    def _take(self, message: Any) -> None:
        if isinstance(message, GenerateRequest):
            self.sent.append(message)
            self._answers.add(asyncio.create_task(self._answer(message)))
        elif isinstance(message, AbortRequest):
            self._aborted.add(message.rid)

    async def _answer(self, request: GenerateRequest) -> None:
        pieces = self.pieces if request.stream else ["".join(self.pieces)]
        ids_before = 0
        for number, piece in enumerate(pieces):
            while number == self.held_at and request.rid not in self._aborted:
                await asyncio.sleep(0.001)
            ids = self.tokenizer.encode(piece)
            finish = self.finish if number == len(pieces) - 1 else None
            if request.rid in self._aborted:
                piece, ids, finish = "", [], FinishReason("abort", message="aborted")
            ids_before += len(ids)
            stats = RequestStats(len(request.input_ids), ids_before, self.cached_tokens)
            told = None if request.wish is None else _told(request, ids, first=ids_before == len(ids))
            self.manager.receive(TextBatch([TextOutput(request.rid, piece, ids, stats, finish, told)]))
            if finish is not None:
                return
            await asyncio.sleep(0)

    def client(self) -> httpx2.AsyncClient:
        """For the clients of OpenAI and Anthropic; used in a coroutine that ``run`` is given."""
        transport = httpx2.ASGITransport(app=self.app)
        return httpx2.AsyncClient(transport=transport, base_url="http://desk", timeout=10)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run(work)

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx2.Response:
        async def ask() -> httpx2.Response:
            async with self.client() as client:
                return await client.request(method, path, json=body)

        return self.run(ask())

    def post(self, path: str, body: dict[str, Any]) -> httpx2.Response:
        return self.ask("POST", path, body)

    def chat(self, pieces: Sequence[str], **body: Any) -> dict[str, Any]:
        self.pieces = list(pieces)
        response = self.post(URL, {"messages": [{"role": "user", "content": "Hello"}], **body})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def refused(self, **body: Any) -> str:
        response = self.post(URL, {"messages": [{"role": "user", "content": "Hello"}], **body})
        assert response.status_code == 400, response.text
        return str(response.json()["message"])

    def stream(self, pieces: Sequence[str], **body: Any) -> list[dict[str, Any]]:
        self.pieces = list(pieces)
        response = self.post(
            URL, {"messages": [{"role": "user", "content": "Hello"}], "stream": True, **body}
        )
        lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line]
        assert response.status_code == 200 and lines.pop() == "[DONE]", response.text
        return [json.loads(line) for line in lines]

    def prompt(self) -> str:
        return self.tokenizer.decode(self.sent[-1].input_ids, skip_special_tokens=False)


def _told(request: GenerateRequest, ids: Sequence[int], first: bool) -> TokenReport:
    """Log-probabilities that tell their id; the likeliest of an id are it and those behind it."""
    wish = request.wish
    assert wish is not None
    start = wish.logprob_start if wish.logprob_start >= 0 else len(request.input_ids)

    def of(told: Sequence[int]) -> Logprobs:
        tops = [range(i, i + wish.num_top) for i in told] if wish.num_top else []
        return Logprobs(
            tuple(-float(i) for i in told),
            tuple(tuple(-float(i) for i in top) for top in tops),
            tuple(map(tuple, tops)),
        )

    hidden = (Vectors(array("f", [ids[-1], 0.5]).tobytes(), 2),) if wish.hidden_states and ids else ()
    if not wish.logprobs:
        return TokenReport(Logprobs(), Logprobs(), hidden)
    return TokenReport(of(request.input_ids[start + 1 :] if first else []), of(ids), hidden)


def message_of(events: Sequence[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """A message put together as OpenAI's client does it."""
    message: dict[str, Any] = {"role": None, "content": "", "reasoning_content": "", "tool_calls": []}
    for event in events:
        for choice in event["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            message["role"] = delta.get("role", message["role"])
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name) or ""
            for part in delta.get("tool_calls", []):
                calls = message["tool_calls"]
                if part["index"] == len(calls):
                    calls.append({"id": part["id"], "type": part["type"], "function": dict(part["function"])})
                else:
                    assert "id" not in part and "name" not in part["function"]
                    calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    return message

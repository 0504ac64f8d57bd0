"""A whole server in one process and one thread: HTTP application, tokenizer, scheduler, detokenizer, and a
tiny float64 model. What decides the mode of every decode step is the test's."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import httpx2
from helpers.tiny_executor import _root, target_folder, tiny_executor
from helpers.tiny_tokenizer import CHAT_TEMPLATE, write_merged_tokenizer

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.constrained.compiling import GrammarCompiler
from sglang.srt.entrypoints.body_sends import BodySends
from sglang.srt.entrypoints.context import ServerContext
from sglang.srt.entrypoints.http_server import build_app
from sglang.srt.managers.chat_templates import load_chat_template
from sglang.srt.managers.detokenizer_manager import DetokenizerManager
from sglang.srt.managers.io_struct import TokenBatch
from sglang.srt.managers.metrics import NullSink
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_process import _grammars, scheduler_config
from sglang.srt.managers.text_observers import Observers
from sglang.srt.managers.tokenizer_manager import Limits, TokenizerManager
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.model_executor.in_process_executor import InProcessExecutor
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.toggle import Decision, Policy, Reason, ToggleInput
from sglang.srt.utils.text_tokenizer import TextTokenizer

VOCAB = 272  # as many as the tokenizer has; the last two are <|end|> (special, ends a text) and <think now>
END_ID = 270
Answer = dict[str, Any]


@cache
def tokenizer_folder() -> Path:
    folder = write_merged_tokenizer(Path(_root().name) / "merged-tokenizer")
    config = folder / "tokenizer_config.json"
    template = "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}" + CHAT_TEMPLATE
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": template}))
    return folder


def plainly(state: ToggleInput) -> Decision:
    return Decision(0, Reason.MANUAL)


def speculatively(state: ToggleInput) -> Decision:
    return Decision(state.num_steps if state.spec_fits else 0, Reason.MANUAL)


def switching() -> Policy:
    """In every step."""
    turns = iter(range(10**9))

    def decide(state: ToggleInput) -> Decision:
        return (speculatively if next(turns) % 2 == 0 else plainly)(state)

    return decide


class WholeServer:
    def __init__(
        self,
        policy: Policy,
        shape: tuple[int, int, int] | None,
        grammars: GrammarCompiler | None = None,
        **args: Any,
    ) -> None:
        """``grammars``: of another one, so that what is compiled is compiled once."""
        folder = target_folder("llama", VOCAB)
        given = ServerArgs(
            model_path=str(folder),
            tokenizer_path=str(tokenizer_folder()),
            served_model_name="m",
            device="cpu",
            reasoning_parser="qwen3",
            tool_call_parser="qwen25",
            enable_priority_scheduling=True,
            enable_custom_logit_processor=True,
            enable_return_hidden_states=True,
            incremental_streaming_output=True,
            **args,
        )
        self.args = given.resolve("LlamaForCausalLM")
        self.executor: InProcessExecutor = tiny_executor(shape, "llama", VOCAB, max_running_requests=12)
        self.modes: Counter[bool] = Counter()  # decode steps; True: speculative
        self._tokenizer = TextTokenizer.from_folder(tokenizer_folder())
        self._model = ModelConfig.from_folder(str(folder), 1000)
        self._detokenizer = DetokenizerManager(self._tokenizer)
        eos_ids = self._tokenizer.stop_ids(self._model.eos_ids)
        info = self.executor.info
        self.grammars = grammars or _grammars(self.args, self._tokenizer, info, eos_ids)
        self.scheduler = Scheduler(
            self.executor, scheduler_config(self.args, info), self._counting(policy),
            RadixCache(info.page_size), self._tokenizer.decode_shown, eos_ids, self._emit,
            lambda reply: self.manager.receive(reply), NullSink(), time.time, None, self.grammars,
        )  # fmt: skip
        limits = Limits(info.context_len, info.num_pages * info.page_size, info.vocab_size, 64)
        self.manager: TokenizerManager = TokenizerManager(
            self._tokenizer, limits, self.scheduler.receive, Observers(), 1
        )
        template = load_chat_template(self._tokenizer, None)
        context = ServerContext(self.args, self._model, self.manager, template, "", 0.0, 0.0)
        self._app = BodySends(build_app(context))  # as a server serves it

    def _counting(self, policy: Policy) -> Policy:
        def decide(state: ToggleInput) -> Decision:
            decision = policy(state)
            self.modes[decision.draft_len > 0] += 1
            return decision

        return decide

    def _emit(self, batch: TokenBatch) -> None:
        self.manager.receive(self._detokenizer.handle(batch))

    def ask(self, calls: Sequence[tuple[str, dict[str, Any]]]) -> list[httpx2.Response]:
        """All at once; (path, body) of each."""
        return asyncio.run(self._ask(calls))

    async def _ask(self, calls: Sequence[tuple[str, dict[str, Any]]]) -> list[httpx2.Response]:
        transport = httpx2.ASGITransport(app=self._app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://server", timeout=60) as client:
            waiting = asyncio.gather(*[client.post(path, json=body) for path, body in calls])
            while not waiting.done():
                if self.scheduler.has_work:
                    self.scheduler.step()
                await asyncio.sleep(0)
            return await waiting

    def check_end(self) -> None:
        """Nothing is held any more."""
        scheduler, info = self.scheduler, self.executor.info
        scheduler.cache.check_integrity()
        assert scheduler.pages.num_free + scheduler.cache.num_pages == info.num_pages, "a page is lost"
        assert scheduler.slots.num_free == info.num_slots, "a slot is lost"
        assert self._detokenizer.num_running == 0 and self.manager.num_running == 0

    def close(self) -> None:
        self.executor.shutdown()


# ---- what answers say, whole and streamed alike


def answers_of(path: str, stream: bool, response: httpx2.Response) -> list[Answer]:
    """One for each sample, in their order, without times, ids of calls, and what speculation did."""
    assert response.status_code == 200, response.text
    if not stream:
        body = response.json()
        parts = [body] if isinstance(body, dict) else body
    else:
        lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line]
        assert lines.pop() == "[DONE]"
        parts = [json.loads(line) for line in lines]
    return _native(parts) if path == "/generate" else _openai(parts)


_JOINED = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")
_LAST = (
    "finish_reason", "prompt_tokens", "completion_tokens", "hidden_states", "output_token_logprobs_length",
    "input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs",
)  # fmt: skip


def _native(parts: list[Answer]) -> list[Answer]:
    made: dict[int, Answer] = {}
    for part in parts:
        assert "error" not in part, part
        answer = made.setdefault(part.get("index", 0), {"text": "", "ids": [], **{n: [] for n in _JOINED}})
        meta = part["meta_info"]
        answer["text"] += part["text"]
        answer["ids"] += part["output_ids"]
        for name in _JOINED:
            answer[name] += meta.get(name, [])
        answer |= {name: meta[name] for name in _LAST if name in meta}
        answer |= {"prompt_token_ids": part.get("prompt_token_ids")}
    return [made[index] for index in sorted(made)]


def _openai(parts: list[Answer]) -> list[Answer]:
    made: dict[int, Answer] = {}
    usage = None
    for part in parts:
        assert "error" not in part, part
        usage = part.get("usage") or usage
        for choice in part["choices"]:
            answer = made.setdefault(choice["index"], _empty())
            said = choice.get("message") or choice.get("delta") or choice
            for name in ("content", "reasoning_content", "text"):
                answer[name] += said.get(name) or ""
            _add_calls(answer["calls"], said.get("tool_calls") or [])
            _add_logprobs(answer["logprobs"], choice.get("logprobs") or {})
            for name in ("finish_reason", "matched_stop"):
                answer[name] = choice.get(name) if choice.get(name) is not None else answer.get(name)
            answer["hidden"] = said.get("hidden_states") or choice.get("hidden_states") or answer["hidden"]
            answer["ids"] += choice.get("token_ids") or []
    counts = {name: (usage or {}).get(name) for name in ("prompt_tokens", "completion_tokens")}
    return [made[index] | {"usage": counts} for index in sorted(made)]


def _empty() -> Answer:
    return {
        "content": "", "reasoning_content": "", "text": "", "calls": [], "logprobs": {}, "hidden": None,
        "ids": [],
    }  # fmt: skip


def _add_calls(calls: list[list[str]], parts: list[Answer]) -> None:
    for number, part in enumerate(parts):
        function = part["function"]
        if part.get("index", number) == len(calls):
            calls.append([function["name"], ""])
        calls[part.get("index", number)][1] += function.get("arguments") or ""


def _add_logprobs(told: Answer, logprobs: Answer) -> None:
    for name, values in logprobs.items():
        told[name] = told.get(name, []) + (values or [])

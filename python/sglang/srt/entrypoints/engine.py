"""``sglang.Engine``: the server without HTTP, inside the caller's process."""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import replace
from typing import Any, Final, TypeVar

from sglang.srt.entrypoints.answering import raise_if_failed
from sglang.srt.entrypoints.context import ServerContext
from sglang.srt.entrypoints.native_answer import NativeAnswers
from sglang.srt.entrypoints.native_request import UNSUPPORTED, NativeCall, parse_call
from sglang.srt.entrypoints.native_wishes import FIELDS
from sglang.srt.entrypoints.prepare import Prepared, StartError, prepare
from sglang.srt.entrypoints.scheduling_fields import SCHEDULING_FIELDS
from sglang.srt.entrypoints.server_runtime import ServerRuntime
from sglang.srt.managers.text_request import Group
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.sampling.custom_logit_processor import processor_text
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.flags import ServerArgsError
from sglang.srt.utils.installation import upstream_conflict

T = TypeVar("T")

_GONE: Final = "the caller does not want it any more"
_END: Final = object()
_FEATURES: Final = frozenset(
    {
        *UNSUPPORTED,
        *FIELDS,
        *SCHEDULING_FIELDS,
        "return_prompt_token_ids",
        "log_metrics",
        "require_reasoning",
    }
)

Answer = dict[str, Any]


class Engine:
    """Keyword arguments are the fields of ``ServerArgs``, or ``server_args``, one of them.

    Raises ``ServerArgsError`` or ``StartError`` where the configuration is wrong, and ``RequestError``
    (a ``ValueError``) for a request that can't be served.
    """

    def __init__(self, server_args: ServerArgs | None = None, **kwargs: Any) -> None:
        conflict = upstream_conflict()
        if conflict:
            raise StartError(conflict)
        given = server_args or ServerArgs.from_keywords(**{"log_level": "error", **kwargs})
        logging.getLogger("sglang").setLevel(given.log_level.upper())
        if given.tokenizer_worker_num > 1:
            raise ServerArgsError(
                "an Engine answers its caller alone: leave tokenizer_worker_num out, or start a server"
            )
        if given.enable_metrics:
            raise ServerArgsError("an Engine serves no /metrics: leave enable_metrics out, or start a server")
        prepared = prepare(given)
        # The embedded model comes with metrics, which a server is asked for.
        prepared = replace(prepared, args=replace(prepared.args, enable_metrics=False))
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sglang-engine", daemon=True)
        self._thread.start()
        try:
            self._runtime = self._wait(ServerRuntime.start(prepared))
        except BaseException:
            self._stop_loop()
            raise
        self._context = self._make_context(prepared)
        atexit.register(self.shutdown)

    def _make_context(self, prepared: Prepared) -> ServerContext:
        return ServerContext(
            args=self._runtime.args,
            model=prepared.model,
            manager=self._manager,
            chat_template=prepared.chat_template,
            launch_command="sglang.Engine",
            started_ts=self._runtime.started_ts,
            startup_time_s=self._runtime.startup_time_s,
            request_log=self._runtime.watching.request_log,
        )

    # ---- generation

    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        stream: bool = False,
        rid: str | list[str] | None = None,
        **features: Any,
    ) -> Answer | list[Answer] | Iterator[Answer]:
        """As POST /generate: an answer, a list of them for several prompts, an iterator with ``stream``.

        ``custom_logit_processor`` may be a class too, or its import path ("package.module:Class").
        """
        call = self._call(prompt, sampling_params, input_ids, stream, rid, features)
        if stream:
            return self._stream(call)
        return self._wait(self._whole(call))

    async def async_generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        stream: bool = False,
        rid: str | list[str] | None = None,
        **features: Any,
    ) -> Answer | list[Answer] | AsyncIterator[Answer]:
        """The same from a coroutine; cancelling it ends the request."""
        call = self._call(prompt, sampling_params, input_ids, stream, rid, features)
        if stream:
            return self._async_stream(call)
        return await asyncio.wrap_future(self._submit(self._whole(call)))

    def _call(
        self,
        prompt: Any,
        sampling_params: Any,
        input_ids: Any,
        stream: bool,
        rid: Any,
        features: dict[str, Any],
    ) -> NativeCall:
        unknown = sorted(set(features) - _FEATURES)
        if unknown:
            raise TypeError(f"generate() got unexpected keyword arguments: {', '.join(unknown)}")
        given = features.get("custom_logit_processor")
        if isinstance(given, type | str) and given:
            features["custom_logit_processor"] = processor_text(given)
        body = {"text": prompt, "input_ids": input_ids, "sampling_params": sampling_params, "rid": rid}
        parser = self._context.args.reasoning_parser
        return parse_call({**features, **body, "stream": stream}, parser, self._manager.tokenizer)

    def _stream(self, call: NativeCall) -> Iterator[Answer]:
        group = self._wait(self._manager.submit(call.requests))
        answers = self._answers(call).stream(group)
        try:
            while (answer := self._wait(_next(answers))) is not _END:
                yield answer
        finally:
            self._give_up(group)

    async def _async_stream(self, call: NativeCall) -> AsyncIterator[Answer]:
        group = await asyncio.wrap_future(self._submit(self._manager.submit(call.requests)))
        answers = self._answers(call).stream(group)
        try:
            while (answer := await asyncio.wrap_future(self._submit(_next(answers)))) is not _END:
                yield answer
        finally:
            self._give_up(group)

    async def _whole(self, call: NativeCall) -> Answer | list[Answer]:
        group = await self._manager.submit(call.requests)
        try:
            samples = await group.finished()
        finally:
            self._manager.abort_group(group, _GONE)
        for sample in samples:
            raise_if_failed(sample)
        return self._answers(call).whole(samples)

    def _answers(self, call: NativeCall) -> NativeAnswers:
        args = self._runtime.args
        return NativeAnswers(call, args.weight_version, args.incremental_streaming_output)

    def _give_up(self, group: Group) -> None:
        if not self._closed:
            self._loop.call_soon_threadsafe(self._manager.abort_group, group, _GONE)

    # ---- control

    def flush_cache(self) -> bool:
        """Whether it was done: not while requests run."""
        return self._wait(self._manager.flush_cache()).ok

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        reason = "aborted by abort_request"
        if self._closed:
            return
        if abort_all:
            self._loop.call_soon_threadsafe(self._manager.abort_all, reason)
        else:
            self._loop.call_soon_threadsafe(self._manager.abort, rid, reason)

    def set_internal_state(self, server_args: dict[str, Any]) -> dict[str, Any]:
        """The new values.

        Raises:
            ValueError: a value that can't be changed to; nothing has changed.
        """
        reply = self._wait(self._manager.set_state(server_args))
        if not reply.ok:
            raise ValueError(reply.error)
        return reply.body

    def get_server_info(self) -> dict[str, Any]:
        return self._wait(self._context.server_info())

    def get_model_info(self) -> dict[str, Any]:
        return self._context.model_info()

    def shutdown(self) -> None:
        """End every process and wait for that. May be called again."""
        if self._closed:
            return
        closing = self._submit(self._close())
        self._closed = True
        atexit.unregister(self.shutdown)
        closing.result()
        self._stop_loop()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    # ---- the loop in its thread

    @property
    def _manager(self) -> TokenizerManager:
        assert self._runtime.manager is not None
        return self._runtime.manager

    async def _close(self) -> None:
        self._runtime.close()

    def _submit(self, work: Coroutine[Any, Any, T]) -> Any:
        if self._closed:
            work.close()
            raise RuntimeError("the engine has been shut down")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        result: T = self._submit(work).result()
        return result

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _next(answers: AsyncIterator[Answer]) -> Any:
    return await anext(answers, _END)

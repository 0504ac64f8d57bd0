"""Collects the new ids of requests and emits them, one message a step."""

from __future__ import annotations

from collections.abc import Callable

from sglang.srt.managers.io_struct import TokenBatch, TokenOutput
from sglang.srt.managers.request import Request


class OutputQueue:
    def __init__(self, emit: Callable[[TokenBatch], None], stream_interval: int) -> None:
        self._emit = emit
        self._stream_interval = stream_interval
        self._outputs: list[TokenOutput] = []

    def offer(self, request: Request) -> None:
        """The request has new ids or has finished; queue them if it is time to."""
        num_outputs = len(request.ids) - request.prompt_len
        if request.finish is None and not self._is_due(request, num_outputs - request.num_emitted):
            return
        params = request.params
        self._outputs.append(
            TokenOutput(
                rid=request.rid,
                new_ids=request.ids[request.prompt_len + request.num_emitted :],
                stats=request.stats(),
                finish=request.finish,
                stop_trim=request.stop_trim,
                skip_special_tokens=params.skip_special_tokens,
                stop=() if params.no_stop_trim else params.stop,
                no_stop_trim=params.no_stop_trim,
                report=None if request.report is None else request.report.take(),
            )
        )
        request.num_emitted = num_outputs

    def _is_due(self, request: Request, num_new: int) -> bool:
        if not request.stream or num_new == 0:
            return False
        # The first token never waits for an interval.
        interval = request.params.stream_interval or self._stream_interval
        return request.num_emitted == 0 or num_new >= interval

    def flush(self) -> None:
        if self._outputs:
            batch = TokenBatch(outputs=self._outputs)
            self._outputs = []
            self._emit(batch)

"""How a request ends: answered once, then released."""

from __future__ import annotations

from sglang.srt.managers.io_struct import FinishReason
from sglang.srt.managers.outputs import OutputQueue
from sglang.srt.managers.release import Releaser
from sglang.srt.managers.request import Request
from sglang.srt.managers.request_table import RequestTable
from sglang.srt.managers.stats import StatsRecorder

BAD_REQUEST = (400, "BadRequestError")
INTERNAL_ERROR = (500, "InternalServerError")
UNAVAILABLE = (503, "ServiceUnavailableError")


def abort_reason(message: str, kind: tuple[int, str] | None = None) -> FinishReason:
    """``kind`` None: the client wanted it, which is no error."""
    status_code, err_type = kind or (None, None)
    return FinishReason(type="abort", message=message, status_code=status_code, err_type=err_type)


def pool_is_full(request: Request, token_capacity: int) -> FinishReason:
    return abort_reason(
        f"the KV cache of {token_capacity} tokens is full: this request alone, with {request.prompt_len} "
        f"prompt and {request.num_outputs} output tokens, cannot grow any further",
        INTERNAL_ERROR,
    )


class Finisher:
    def __init__(
        self, table: RequestTable, releaser: Releaser, outputs: OutputQueue, stats: StatsRecorder
    ) -> None:
        self._table = table
        self._releaser = releaser
        self._outputs = outputs
        self._stats = stats

    def finish(
        self, request: Request, reason: FinishReason, stop_trim: str | None = None, keep_prefix: bool = True
    ) -> None:
        request.finish = reason
        request.stop_trim = stop_trim
        self._table.remove(request)
        self._outputs.offer(request)
        self._stats.finished(aborted=reason.type == "abort")
        self._releaser.release(request, keep_prefix)

    def refuse(self, request: Request, reason: FinishReason) -> None:
        """The request never gets into the table."""
        request.finish = reason
        self._outputs.offer(request)
        self._stats.finished(aborted=True)

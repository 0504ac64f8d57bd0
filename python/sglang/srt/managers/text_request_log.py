"""--log-requests and --enable-request-time-stats-logging: lines in the log for every request."""

from __future__ import annotations

import json
import logging
from typing import Any, Final

from sglang.srt.managers.text_observers import EndsOnly, outcome_of, parameters_of, times_of
from sglang.srt.managers.text_request import Sample

logger = logging.getLogger(__name__)

LEVELS: Final = (0, 1, 2, 3)
_PART: Final = 2048  # characters of a text at level 2


class RequestLog(EndsOnly):
    """0: figures; 1: the parameters too; 2: the beginnings of the texts too; 3: all of them.

    Changed while it runs by POST /configure_logging.
    """

    def __init__(self, enabled: bool, level: int) -> None:
        self.enabled = enabled
        self.level = level

    def received(self, sample: Sample) -> None:
        if not self.enabled or sample.request.no_logs:
            return
        request = sample.request
        line: dict[str, Any] = {
            "rid": sample.rid,
            "prompt_tokens": len(sample.prompt_ids),
            "stream": request.stream,
        }
        if self.level >= 1:
            line["sampling_params"] = parameters_of(sample)
        if self.level >= 2:
            line["prompt"] = self._shown(request.prompt)
        logger.info("Receive: %s", json.dumps(line, ensure_ascii=False))

    def ended(self, sample: Sample) -> None:
        if not self.enabled or sample.request.no_logs:
            return
        line = outcome_of(sample)
        if self.level >= 2:
            line["text"] = self._shown(sample.text)
        logger.info("Finish: %s", json.dumps(line, ensure_ascii=False))

    def _shown(self, text: str | list[int]) -> str | list[int]:
        if self.level >= 3 or len(text) <= _PART:
            return text
        return text[:_PART] + "…" if isinstance(text, str) else [*text[:_PART]]


class TimeStatsLog(EndsOnly):
    def ended(self, sample: Sample) -> None:
        if sample.request.no_logs:
            return
        times = ", ".join(f"{name}: {1000 * seconds:.2f} ms" for name, seconds in times_of(sample).items())
        stats = sample.stats
        logger.info(
            "Req Time Stats(rid=%s, input len=%d, output len=%d): %s",
            sample.rid,
            stats.prompt_tokens,
            stats.completion_tokens,
            times,
        )

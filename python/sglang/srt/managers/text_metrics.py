"""What clients see, as metrics: latencies and counts of requests (labels and names as SGLang's)."""

from __future__ import annotations

from typing import Final

from sglang.srt.managers.io_struct import TextOutput
from sglang.srt.managers.text_request import Sample

_FIRST_TOKEN: Final = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
_END_TO_END: Final = (*_FIRST_TOKEN, 600, 1200, 1800, 2400)
_BETWEEN: Final = (
    0.002, 0.004, 0.006, 0.008, 0.010, 0.015, 0.020, 0.025, 0.030, 0.035, 0.040, 0.060, 0.080, 0.1, 0.2, 0.4,
    0.6, 0.8, 1, 2, 4, 6, 8,
)  # fmt: skip


class PrometheusTextMetrics:
    """Imports prometheus_client only here: its multiprocess folder is named in the environment by then."""

    def __init__(self, model_name: str) -> None:
        from prometheus_client import Counter, Histogram

        names = ("model_name", "engine_type", "is_streaming")
        self._labels = (model_name, "unified")

        def counter(name: str, text: str) -> Counter:
            return Counter(f"sglang:{name}", text, names)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"sglang:{name}", text, names, buckets=buckets)

        self._requests = counter("num_requests_total", "Requests that have finished.")
        self._prompt_tokens = counter("prompt_tokens_total", "Prompt tokens of finished requests.")
        self._output_tokens = counter("generation_tokens_total", "Tokens generated.")
        self._first = histogram("time_to_first_token_seconds", "Request to first token.", _FIRST_TOKEN)
        self._between = histogram("inter_token_latency_seconds", "Between two tokens.", _BETWEEN)
        self._per_token = histogram("request_time_per_output_token_seconds", "Mean per request.", _BETWEEN)
        self._whole = histogram("e2e_request_latency_seconds", "Request to last token.", _END_TO_END)

    def received(self, sample: Sample) -> None:
        return None

    def ended(self, sample: Sample) -> None:
        return None

    def output(self, sample: Sample, output: TextOutput, now: float) -> None:
        if not sample.request.log_metrics:
            return
        labels = (*self._labels, "true" if sample.request.stream else "false")
        if output.new_ids:
            self._output_tokens.labels(*labels).inc(len(output.new_ids))
            self._observe_tokens(sample, output, now, labels)
        if output.finish is not None:
            self._observe_end(sample, output, now, labels)

    def _observe_tokens(
        self, sample: Sample, output: TextOutput, now: float, labels: tuple[str, ...]
    ) -> None:
        count, first_ts = len(output.new_ids), output.stats.first_token_ts
        last_ts = sample.last_output_ts
        if last_ts is None:
            # What does not stream comes all at once: the scheduler knows when its first token came.
            last_ts = first_ts if first_ts is not None and count > 1 else now
            self._first.labels(*labels).observe(max(0.0, last_ts - sample.created_ts))
            count -= 1
        # A chunk of k tokens is k equal intervals: speculation must not look like one slow token.
        interval = max(0.0, now - last_ts) / max(count, 1)
        histogram = self._between.labels(*labels)
        for _ in range(count):
            histogram.observe(interval)

    def _observe_end(self, sample: Sample, output: TextOutput, now: float, labels: tuple[str, ...]) -> None:
        stats = output.stats
        self._requests.labels(*labels).inc()
        self._prompt_tokens.labels(*labels).inc(stats.prompt_tokens)
        self._whole.labels(*labels).observe(now - sample.created_ts)
        if stats.completion_tokens > 1 and stats.first_token_ts is not None:
            decode_s = max(0.0, now - stats.first_token_ts)
            self._per_token.labels(*labels).observe(decode_s / (stats.completion_tokens - 1))

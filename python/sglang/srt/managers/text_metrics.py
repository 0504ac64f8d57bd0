"""What clients see, as metrics: latencies and counts of requests (labels and names as SGLang's)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from sglang.srt.constrained.grammar import spec_of
from sglang.srt.managers.io_struct import TextOutput
from sglang.srt.managers.text_request import Sample

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter

    from sglang.srt.managers.text_tally import HistogramTally

_FIRST_TOKEN: Final = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
_END_TO_END: Final = (*_FIRST_TOKEN, 600, 1200, 1800, 2400)
_BETWEEN: Final = (
    0.002, 0.004, 0.006, 0.008, 0.010, 0.015, 0.020, 0.025, 0.030, 0.035, 0.040, 0.060, 0.080, 0.1, 0.2, 0.4,
    0.6, 0.8, 1, 2, 4, 6, 8,
)  # fmt: skip


MOST_COMBINATIONS: Final = 30  # of values of the labels that requests bring; 100 made a scrape take 0.6 s
OTHER: Final = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextMetricsSettings:
    model_name: str
    first_token: tuple[float, ...] = _FIRST_TOKEN  # borders, in seconds
    between: tuple[float, ...] = _BETWEEN
    end_to_end: tuple[float, ...] = _END_TO_END
    prompt_tokens: tuple[float, ...] | None = None  # None: no such histogram
    output_tokens: tuple[float, ...] | None = None
    extra_labels: tuple[tuple[str, str], ...] = ()
    custom_labels: tuple[str, ...] = ()  # names; requests bring the values


class CustomValues:
    """Of the labels that requests bring. Each combination is a time series of each metric, so that there can
    only be so many.
    """

    def __init__(self, num_labels: int) -> None:
        self._known: set[tuple[str, ...]] = set()
        self._none = ("",) * num_labels
        self._others = (OTHER,) * num_labels

    def of(self, values: tuple[str, ...]) -> tuple[str, ...]:
        values = values or self._none
        if values in self._known:
            return values
        if len(self._known) >= MOST_COMBINATIONS:
            return self._others
        self._known.add(values)
        return values


class _TokenTally:
    """Tokens and the time between them, of a batch of outputs."""

    def __init__(self, counter: Counter, between: HistogramTally) -> None:
        self.tokens = 0
        self.between = between
        self._counter = counter

    def flush(self) -> None:
        if self.tokens:
            self._counter.inc(self.tokens)
            self.tokens = 0
        self.between.flush()


class PrometheusTextMetrics:
    """Imports prometheus_client only here: its multiprocess folder is named in the environment by then."""

    def __init__(self, settings: TextMetricsSettings, registry: CollectorRegistry | None = None) -> None:
        from prometheus_client import REGISTRY, Counter, Gauge, Histogram

        from sglang.srt.managers.text_tally import BulkHistogram

        place = registry or REGISTRY

        extra = [name for name, _ in settings.extra_labels]
        self._own = (settings.model_name, "unified", *(value for _, value in settings.extra_labels))
        self._custom = CustomValues(len(settings.custom_labels)) if settings.custom_labels else None
        server_names = ("model_name", "engine_type", *extra)
        names = (*server_names, *settings.custom_labels)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"sglang:{name}", text, (*names, "is_streaming"), registry=place)

        def histogram(
            name: str, text: str, buckets: tuple[float, ...], label: str = "is_streaming"
        ) -> Histogram:
            labels = (*names, label) if label else names
            return Histogram(f"sglang:{name}", text, labels, buckets=buckets, registry=place)

        self._requests = counter("num_requests_total", "Requests that have finished.")
        self._prompt_tokens = counter("prompt_tokens_total", "Prompt tokens of finished requests.")
        self._output_tokens = counter("generation_tokens_total", "Tokens generated.")
        self._structured = Counter(
            "sglang:num_so_requests_total", "Requests with a grammar.", names, registry=place
        )
        self._first = histogram(
            "time_to_first_token_seconds", "Request to first token.", settings.first_token
        )
        self._between = BulkHistogram(
            "sglang:inter_token_latency_seconds", "Between two tokens.", (*names, "is_streaming"),
            buckets=settings.between, registry=place,
        )  # fmt: skip
        self._tallies: dict[object, _TokenTally] = {}  # by what tells labels apart
        self._per_token = histogram(
            "request_time_per_output_token_seconds", "Mean per request.", settings.between
        )
        self._whole = histogram("e2e_request_latency_seconds", "Request to last token.", settings.end_to_end)
        self._queue = histogram("queue_time_seconds", "Request to admission.", settings.first_token, "")
        self._stages = histogram(
            "per_stage_req_latency_seconds", "Parts of a request: queue, prefill, decode.",
            settings.end_to_end, "stage",
        )  # fmt: skip
        self._tokens: tuple[Histogram, Histogram, Histogram] | None = None
        if settings.prompt_tokens is not None and settings.output_tokens is not None:
            self._tokens = (
                histogram("prompt_tokens_histogram", "Tokens of prompts.", settings.prompt_tokens, ""),
                histogram(
                    "uncached_prompt_tokens_histogram", "Those not found in the prefix cache.",
                    settings.prompt_tokens, "",
                ),
                histogram("generation_tokens_histogram", "Tokens of answers.", settings.output_tokens, ""),
            )  # fmt: skip
        self._startup = Gauge(
            "sglang:startup_time_seconds", "From launch to ready.", (*server_names, "phase"),
            multiprocess_mode="mostrecent", registry=place,
        )  # fmt: skip

    def started(self, seconds: float) -> None:
        self._startup.labels(*self._own, "total").set(seconds)

    def received(self, sample: Sample) -> None:
        if sample.request.log_metrics and spec_of(sample.request.sampling) is not None:
            self._structured.labels(*self._of(sample)).inc()

    def ended(self, sample: Sample) -> None:
        """Its stages, as far as it came."""
        if not sample.request.log_metrics:
            return
        stats, own = sample.stats, self._of(sample)
        points = [sample.created_ts, stats.admitted_ts, stats.first_token_ts, sample.finished_ts]
        for stage, since, until in zip(("queue", "prefill", "decode"), points, points[1:], strict=False):
            if since is None or until is None:
                break
            self._stages.labels(*own, stage).observe(max(0.0, until - since))
            if stage == "queue":
                self._queue.labels(*own).observe(max(0.0, until - since))
        if self._tokens is not None:
            uncached = stats.prompt_tokens - stats.cached_tokens
            for histogram, count in zip(
                self._tokens, (stats.prompt_tokens, uncached, stats.completion_tokens), strict=True
            ):
                histogram.labels(*own).observe(count)

    def output(self, sample: Sample, output: TextOutput, now: float) -> None:
        if not sample.request.log_metrics:
            return
        if output.new_ids:
            self._observe_tokens(sample, output, now)
        if output.finish is not None:
            self._observe_end(sample, output, now)

    def batch_ended(self) -> None:
        for tally in self._tallies.values():
            tally.flush()

    def _of(self, sample: Sample) -> tuple[str, ...]:
        if self._custom is None:
            return self._own
        return (*self._own, *self._custom.of(sample.request.labels))

    def _labels(self, sample: Sample) -> tuple[str, ...]:
        return (*self._of(sample), "true" if sample.request.stream else "false")

    def _tally(self, sample: Sample) -> _TokenTally:
        # Every output of every stream comes here.
        key = sample.request.stream if self._custom is None else self._labels(sample)
        found = self._tallies.get(key)
        if found is None:
            labels = self._labels(sample)
            between = self._between.labels(*labels).tally()
            found = self._tallies[key] = _TokenTally(self._output_tokens.labels(*labels), between)
        return found

    def _observe_tokens(self, sample: Sample, output: TextOutput, now: float) -> None:
        tally, count = self._tally(sample), len(output.new_ids)
        tally.tokens += count
        last_ts = sample.last_output_ts
        if last_ts is None:
            # What does not stream comes all at once: the scheduler knows when its first token came.
            first_ts = output.stats.first_token_ts
            last_ts = first_ts if first_ts is not None and count > 1 else now
            self._first.labels(*self._labels(sample)).observe(max(0.0, last_ts - sample.created_ts))
            count -= 1
        if count:
            # A chunk of k tokens is k equal intervals: speculation must not look like one slow token.
            tally.between.observe(max(0.0, now - last_ts) / count, count)

    def _observe_end(self, sample: Sample, output: TextOutput, now: float) -> None:
        stats, labels = output.stats, self._labels(sample)
        self._requests.labels(*labels).inc()
        self._prompt_tokens.labels(*labels).inc(stats.prompt_tokens)
        self._whole.labels(*labels).observe(now - sample.created_ts)
        if stats.completion_tokens > 1 and stats.first_token_ts is not None:
            decode_s = max(0.0, now - stats.first_token_ts)
            self._per_token.labels(*labels).observe(decode_s / (stats.completion_tokens - 1))

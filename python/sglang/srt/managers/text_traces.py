"""OpenTelemetry: a span for every request, with its parts (--enable-trace). Imported only with that flag.

A ``traceparent`` header of the client makes the span part of the client's trace.
"""

from __future__ import annotations

from typing import Final

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode

from sglang.srt.managers.text_observers import EndsOnly
from sglang.srt.managers.text_request import Sample

_NANO: Final = 1_000_000_000
_FLUSH_MS: Final = 2000


class Traces(EndsOnly):
    def __init__(self, exporter: SpanExporter, model_name: str) -> None:
        resource = Resource.create({"service.name": "sglang", "gen_ai.request.model": model_name})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("sglang")
        self._parents: dict[str, otel_context.Context] = {}

    def received(self, sample: Sample) -> None:
        self._parents[sample.rid] = otel_context.get_current()  # what the client's headers said

    def ended(self, sample: Sample) -> None:
        parent = self._parents.pop(sample.rid, None)
        end = sample.finished_ts
        assert end is not None
        span = self._tracer.start_span(
            "generate",
            parent,
            kind=SpanKind.SERVER,
            start_time=_nanoseconds(sample.created_ts),
            attributes=_attributes(sample),
        )
        finish = sample.finish
        if sample.has_failed and finish is not None:
            span.set_status(Status(StatusCode.ERROR, finish.message))
        inside = trace.set_span_in_context(span)
        points = [sample.created_ts, sample.stats.admitted_ts, sample.stats.first_token_ts, end]
        for name, begin, until in zip(("queue", "prefill", "decode"), points, points[1:], strict=False):
            if begin is not None and until is not None:
                part = self._tracer.start_span(name, inside, start_time=_nanoseconds(begin))
                part.end(_nanoseconds(max(begin, until)))
        span.end(_nanoseconds(max(sample.created_ts, end)))

    def close(self) -> None:
        """What has been collected is sent, if its receiver answers in time."""
        self._provider.force_flush(_FLUSH_MS)
        self._provider.shutdown()


def make_exporter(endpoint: str) -> SpanExporter:
    """http://HOST:PORT/v1/traces: OTLP over HTTP; HOST:PORT: over gRPC."""
    if endpoint.startswith(("http://", "https://")):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as OverHttp

        return OverHttp(endpoint=endpoint)
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as OverGrpc

    return OverGrpc(endpoint=endpoint, insecure=True)


def _nanoseconds(timestamp: float) -> int:
    return int(timestamp * _NANO)


def _attributes(sample: Sample) -> dict[str, str | int | float]:
    stats, finish = sample.stats, sample.finish
    values: dict[str, str | int | float] = {
        "gen_ai.request.id": sample.rid,
        "gen_ai.usage.prompt_tokens": stats.prompt_tokens,
        "gen_ai.usage.completion_tokens": stats.completion_tokens,
        "gen_ai.usage.cached_tokens": stats.cached_tokens,
        "gen_ai.request.temperature": sample.request.sampling.temperature,
        "gen_ai.response.finish_reason": "" if finish is None else finish.type,
        "sglang.decode_steps_plain": stats.decode_steps_plain,
        "sglang.decode_steps_spec": stats.decode_steps_spec,
        "sglang.num_retractions": stats.num_retractions,
    }
    if stats.first_token_ts is not None:
        values["gen_ai.latency.time_to_first_token"] = max(0.0, stats.first_token_ts - sample.created_ts)
    return values

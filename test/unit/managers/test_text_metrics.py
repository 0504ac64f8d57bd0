"""What clients see, counted right whatever the chunks. Run alone: pytest THIS_FILE"""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import REGISTRY

from sglang.srt.managers.io_struct import FinishReason, RequestStats, TextOutput
from sglang.srt.managers.text_metrics import PrometheusTextMetrics
from sglang.srt.managers.text_request import Sample, TextRequest
from sglang.srt.sampling.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def metrics() -> PrometheusTextMetrics:
    return PrometheusTextMetrics("m")  # once: names are registered for the process


def value(name: str, stream: bool) -> float:
    labels = {"model_name": "m", "engine_type": "unified", "is_streaming": "true" if stream else "false"}
    return REGISTRY.get_sample_value(f"sglang:{name}", labels) or 0.0


def make_sample(stream: bool, log_metrics: bool = True) -> Sample:
    request = TextRequest("x", SamplingParams(), stream=stream, log_metrics=log_metrics)
    sample = Sample("r", request, [1, 2, 3], asyncio.Event())
    sample.created_ts = 100.0
    return sample


def feed(
    metrics: PrometheusTextMetrics, sample: Sample, chunks: list[tuple[float, int]], first_ts: float
) -> None:
    total = 0
    for number, (now, count) in enumerate(chunks):
        total += count
        finish = FinishReason("length", length=total) if number == len(chunks) - 1 else None
        stats = RequestStats(3, total, 0, first_token_ts=first_ts)
        output = TextOutput("r", "", [7] * count, stats, finish)
        metrics.output(sample, output, now)
        sample.last_output_ts = now


def test_a_chunk_of_k_tokens_is_k_equal_intervals(metrics: PrometheusTextMetrics) -> None:
    feed(metrics, make_sample(True), [(101.0, 1), (101.4, 4), (101.5, 1)], first_ts=100.9)
    assert value("inter_token_latency_seconds_count", True) == 5
    assert value("inter_token_latency_seconds_sum", True) == pytest.approx(0.5)
    labels = {"model_name": "m", "engine_type": "unified", "is_streaming": "true", "le": "0.2"}
    assert REGISTRY.get_sample_value("sglang:inter_token_latency_seconds_bucket", labels) == 5
    assert value("time_to_first_token_seconds_sum", True) == pytest.approx(1.0)
    assert value("generation_tokens_total", True) == 6
    assert (value("num_requests_total", True), value("prompt_tokens_total", True)) == (1, 3)
    assert value("e2e_request_latency_seconds_sum", True) == pytest.approx(1.5)


def test_what_does_not_stream_has_a_first_token_too(metrics: PrometheusTextMetrics) -> None:
    feed(metrics, make_sample(False), [(103.0, 11)], first_ts=101.0)
    assert value("time_to_first_token_seconds_sum", False) == pytest.approx(1.0)
    assert value("inter_token_latency_seconds_count", False) == 10
    assert value("inter_token_latency_seconds_sum", False) == pytest.approx(2.0)


def test_a_request_may_not_be_counted(metrics: PrometheusTextMetrics) -> None:
    before = value("num_requests_total", True)
    feed(metrics, make_sample(True, log_metrics=False), [(101.0, 1)], first_ts=101.0)
    assert value("num_requests_total", True) == before

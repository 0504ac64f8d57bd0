"""What clients see, counted right whatever the chunks. Run alone: pytest THIS_FILE"""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY, CollectorRegistry

from sglang.srt.configs.metrics_args import token_borders
from sglang.srt.entrypoints.watching import metrics_settings
from sglang.srt.managers import text_metrics
from sglang.srt.managers.io_struct import FinishReason, RequestStats, TextOutput
from sglang.srt.managers.text_metrics import PrometheusTextMetrics, TextMetricsSettings
from sglang.srt.managers.text_request import Sample, TextRequest
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.flags import ServerArgsError


@pytest.fixture(scope="module")
def metrics() -> PrometheusTextMetrics:
    """Once: names are registered for the process."""
    return PrometheusTextMetrics(TextMetricsSettings(model_name="m"))


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
        metrics.batch_ended()
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


def test_stages_tokens_and_grammars_with_labels_of_ones_own() -> None:
    registry = CollectorRegistry()
    settings = TextMetricsSettings(
        model_name="n", prompt_tokens=(2.0, 4.0), output_tokens=(4.0, 8.0), extra_labels=(("zone", "a"),)
    )
    metrics = PrometheusTextMetrics(settings, registry)

    def found(name: str, **labels: str) -> float:
        own = {"model_name": "n", "engine_type": "unified", "zone": "a"}
        value = registry.get_sample_value(f"sglang:{name}", own | labels)
        assert value is not None, name
        return value

    request = TextRequest("x", SamplingParams(regex="a+"))
    sample = Sample("r", request, [1, 2, 3], asyncio.Event())
    sample.created_ts = 100.0
    metrics.received(sample)
    sample.stats = RequestStats(3, 5, 2, admitted_ts=100.5, first_token_ts=101.0)
    sample.end(FinishReason("length", length=5), 103.0)
    metrics.ended(sample)
    refused = Sample("s", TextRequest("x", SamplingParams()), [1], asyncio.Event())
    refused.end(FinishReason("abort", status_code=503), refused.created_ts)
    metrics.received(refused)
    metrics.ended(refused)
    assert found("num_so_requests_total") == 1
    assert (found("queue_time_seconds_sum"), found("queue_time_seconds_count")) == (0.5, 1)
    sums = [found("per_stage_req_latency_seconds_sum", stage=s) for s in ("queue", "prefill", "decode")]
    assert sums == [0.5, 0.5, 2.0]
    assert found("prompt_tokens_histogram_bucket", le="4.0") == 2
    assert found("uncached_prompt_tokens_histogram_sum") == 1 + 1
    assert found("generation_tokens_histogram_bucket", le="4.0") == 1
    metrics.started(7.0)
    assert found("startup_time_seconds", phase="total") == 7.0


def test_labels_that_requests_bring() -> None:
    registry = CollectorRegistry()
    names = ("team", "app")
    metrics = PrometheusTextMetrics(TextMetricsSettings(model_name="n", custom_labels=names), registry)

    def sample_of(*labels: str) -> Sample:
        sample = Sample("r", TextRequest("x", SamplingParams(regex="a"), labels=labels), [1], asyncio.Event())
        sample.created_ts = 100.0
        return sample

    def found(name: str, team: str, app: str, **more: str) -> float | None:
        own = {"model_name": "n", "engine_type": "unified", "team": team, "app": app}
        return registry.get_sample_value(f"sglang:{name}", own | more)

    for labels in (("a", ""), ("a", ""), ("b", "x"), ()):
        sample = sample_of(*labels)
        metrics.received(sample)
        feed(metrics, sample, [(101.0, 4)], first_ts=100.9)
        sample.end(FinishReason("length", length=4), 103.0)
        metrics.ended(sample)
    for (team, app), count in {("a", ""): 2, ("b", "x"): 1, ("", ""): 1}.items():
        assert found("num_requests_total", team, app, is_streaming="false") == count
        assert found("num_so_requests_total", team, app) == count
        assert found("generation_tokens_total", team, app, is_streaming="false") == 4 * count
        assert found("inter_token_latency_seconds_count", team, app, is_streaming="false") == 3 * count
    for number in range(text_metrics.MOST_COMBINATIONS + 20):
        feed(metrics, sample_of(f"t{number}", ""), [(101.0, 4)], first_ts=100.9)
    feed(metrics, sample_of("a", ""), [(101.0, 4)], first_ts=100.9)
    assert found("num_requests_total", "a", "", is_streaming="false") == 3
    others = 3 + 20
    assert found("num_requests_total", "other", "other", is_streaming="false") == others
    assert found("num_requests_total", "t110", "", is_streaming="false") is None
    metrics.started(7.0)


def test_borders_of_histograms() -> None:
    assert token_borders("x", ("tse", "1000", "2", "8")) == (984, 992, 996, 998, 1000, 1002, 1004, 1008, 1016)
    assert token_borders("x", ("custom", "50", "10")) == (10, 50)
    assert token_borders("x", None) == token_borders("x", ("default",))


@given(st.floats(1, 1e6), st.floats(1.01, 10), st.integers(2, 40))
def test_borders_rise_and_are_above_0(middle: float, base: float, count: int) -> None:
    borders = token_borders("x", ("tse", str(middle), str(base), str(count)))
    assert middle in borders and all(0 < a < b for a, b in zip(borders, borders[1:], strict=False))


@pytest.mark.parametrize(
    "line, words",
    [
        ("--bucket-time-to-first-token 1 1", "--bucket-time-to-first-token takes numbers above 0 that rise"),
        ("--bucket-inter-token-latency -1 1", "--bucket-inter-token-latency takes numbers above 0"),
        ("--bucket-e2e-request-latency 2 1", "--bucket-e2e-request-latency takes numbers above 0"),
        (
            "--collect-tokens-histogram --prompt-tokens-buckets tse 5",
            "--prompt-tokens-buckets takes: default",
        ),
        (
            "--collect-tokens-histogram --generation-tokens-buckets custom",
            "--generation-tokens-buckets takes",
        ),
        ("--collect-tokens-histogram --generation-tokens-buckets custom 0 1", "above 0"),
        ("--prompt-tokens-buckets default", "need --collect-tokens-histogram"),
        ("--extra-metric-labels {", "not valid JSON"),
        ('--extra-metric-labels {"a":1}', "object of texts"),
        ('--extra-metric-labels {"tp_rank":"1"}', "'tp_rank' is taken"),
        ('--extra-metric-labels {"a-b":"1"}', "'a-b' is taken, or"),
        ("--tokenizer-metrics-allowed-custom-labels tp_rank", "'tp_rank' is taken"),
        ("--tokenizer-metrics-allowed-custom-labels a a", "twice"),
        ('--tokenizer-metrics-allowed-custom-labels a --extra-metric-labels {"a":"1"}', "twice"),
        (f"--tokenizer-metrics-allowed-custom-labels {' '.join('abcdefghi')}", "at most 8"),
        ("--tokenizer-metrics-custom-labels-header a:b", "can't be a header's name"),
        ("--tokenizer-metrics-custom-labels-header x-mine", "needs --tokenizer-metrics-allowed-custom-l"),
    ],
)
def test_flags_of_metrics_that_can_not_be(line: str, words: str) -> None:
    with pytest.raises(ServerArgsError, match=words):
        ServerArgs.from_command_line(["--model-path", "m", *line.split()]).resolve("Qwen3ForCausalLM")


def test_flags_reach_the_histograms() -> None:
    line = "--bucket-time-to-first-token 1 2 --bucket-inter-token-latency 3 --bucket-e2e-request-latency 4"
    line += (
        " --collect-tokens-histogram --prompt-tokens-buckets custom 5 --generation-tokens-buckets custom 6"
    )
    line += ' --extra-metric-labels {"zone":"a"}'
    args = ServerArgs.from_command_line(["--model-path", "m", *line.split()]).resolve("Qwen3ForCausalLM")
    assert metrics_settings(args) == TextMetricsSettings(
        model_name="m", first_token=(1, 2), between=(3,), end_to_end=(4,), prompt_tokens=(5,),
        output_tokens=(6,), extra_labels=(("zone", "a"),),
    )  # fmt: skip
    assert metrics_settings(ServerArgs(model_path="m", served_model_name="n")).prompt_tokens is None

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fastapi.routing import APIRoute
from helpers.scheduler_harness import SchedulerHarness
from prometheus_client import CollectorRegistry, generate_latest

from sglang.srt.entrypoints.metrics_endpoint import metrics_router
from sglang.srt.managers.io_struct import ContinueRequest, PauseRequest
from sglang.srt.managers.metrics import DecodeReport, IntervalReport
from sglang.srt.managers.prometheus_sink import PrometheusSink, SinkLabels
from sglang.srt.managers.stats import Acceptance
from sglang.srt.model_executor.step_plan import GraphSet, SpecShape

LABELS = {"model_name": "m", "engine_type": "unified", "tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"}


CHAIN = SpecShape(3)
REALTIME = ("prefill_compute", "prefill_cache", "decode")


def make(spec: SpecShape | None = CHAIN, **kwargs: object) -> tuple[SchedulerHarness, CollectorRegistry]:
    registry = CollectorRegistry()
    sink = PrometheusSink(SinkLabels(model_name="m"), registry)
    harness = SchedulerHarness(spec=spec, metrics=sink, decode_log_interval=4, **kwargs)  # type: ignore[arg-type]
    return harness, registry


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"sglang:{name}", {**LABELS, **labels})


def test_a_served_request_shows_in_the_metrics() -> None:
    harness, registry = make(context_len=64, num_pages=150)
    harness.executor.accept_counts.extend([2] * 100)
    harness.send([1, 2, 3, 4, 5], max_new_tokens=25)
    harness.step()
    harness.step()
    assert value(registry, "num_running_reqs") == 1
    harness.run()
    harness.send([1, 2, 3, 4, 5], max_new_tokens=1)
    harness.run()
    assert value(registry, "num_running_reqs") == value(registry, "num_queue_reqs") == 0
    assert value(registry, "max_total_num_tokens") == value(registry, "num_pages") == 150
    assert value(registry, "context_len") == 64 and value(registry, "page_size") == 1
    assert value(registry, "spec_num_steps") == 3 and value(registry, "spec_num_draft_tokens") == 4
    assert value(registry, "decode_steps_total", mode="spec") == 8  # 24 tokens, 3 a step
    assert value(registry, "decode_tokens_total", mode="spec") == 24
    assert value(registry, "decode_steps_total", mode="plain") == 0
    assert value(registry, "spec_verify_calls_total") == 8
    assert value(registry, "spec_accept_length") == 3
    assert value(registry, "spec_accept_rate") == pytest.approx(2 / 3)
    assert value(registry, "spec_draft_len") == 3
    assert value(registry, "cached_tokens_total", cache_source="device") == 4
    assert value(registry, "cache_hit_rate") == pytest.approx(4 / 5)
    assert value(registry, "gen_throughput") > 0  # type: ignore[operator]
    assert value(registry, "num_aborted_requests_total") == 0
    harness.send([], max_new_tokens=1)
    assert value(registry, "num_aborted_requests_total") == 1


def test_how_much_runs_and_for_how_long_the_device_works() -> None:
    harness, registry = make(spec=None)
    most = harness.scheduler.state["effective_max_running_requests_per_dp"]
    for prompt in ([1, 2, 3, 4, 5], [6, 7]):
        harness.send(prompt, max_new_tokens=9)
    harness.step()
    harness.step()
    assert value(registry, "utilization") == 2 / most
    harness.run()
    assert value(registry, "utilization") == 0
    assert value(registry, "decode_sum_seq_lens") == 5 + 2 + 2 * 8  # before the last one
    occupancy = value(registry, "fwd_occupancy")
    assert occupancy is not None and 0 <= occupancy <= 100


def test_tokens_as_they_are_made_and_a_pause() -> None:
    sink_labels = {"zone": "a"}
    registry = CollectorRegistry()
    sink = PrometheusSink(SinkLabels(model_name="m"), registry, sink_labels)
    harness = SchedulerHarness(metrics=sink)
    for _ in range(2):
        harness.send([1, 2, 3, 4, 5], max_new_tokens=6)
        harness.run()
    made = {mode: value(registry, "realtime_tokens_total", mode=mode, **sink_labels) for mode in REALTIME}
    assert made == {"prefill_compute": 5 + 1, "prefill_cache": 4, "decode": 2 * 5}
    harness.send([1], max_new_tokens=6)
    harness.step()
    assert value(registry, "num_paused_reqs", **sink_labels) == 0
    harness.scheduler.receive(PauseRequest("p"))
    assert value(registry, "num_paused_reqs", **sink_labels) == 1
    assert value(registry, "kv_used_tokens", **sink_labels) == value(
        registry, "num_used_tokens", **sink_labels
    )
    harness.scheduler.receive(ContinueRequest("c"))
    assert value(registry, "num_paused_reqs", **sink_labels) == 0
    harness.run()


def test_switches_and_an_interval_without_speculation() -> None:
    harness, registry = make()
    harness.send([1], max_new_tokens=60)
    for _ in range(8):
        harness.step()
    assert value(registry, "spec_accept_length") is not None
    harness.set_state(speculative_disable_bs_threshold=0)
    for _ in range(12):
        harness.step()
    assert value(registry, "spec_switches_total", to="plain", reason="manual") == 1
    assert value(registry, "spec_draft_len") == 0
    assert math.isnan(value(registry, "spec_accept_length"))  # type: ignore[arg-type]


def test_without_a_drafter_there_are_no_spec_metrics() -> None:
    harness, registry = make(spec=None)
    harness.send([1], max_new_tokens=9)
    harness.run()
    assert value(registry, "decode_steps_total", mode="plain") == 8
    text = generate_latest(registry).decode()
    assert "spec_" not in text and 'mode="spec"' not in text


def test_an_interval_never_speculative_has_no_accept_length() -> None:
    harness, registry = make(speculative_disable_bs_threshold=0)
    harness.send([1], max_new_tokens=20)
    harness.run()
    assert value(registry, "spec_accept_length") is None


def test_retractions_are_counted() -> None:
    harness, registry = make(spec=None, num_pages=40, decode_reserve_tokens=1)
    for start in range(3):
        harness.send([start, 1, 2, 3], max_new_tokens=30)
    harness.run()
    harness.check_end()
    count = value(registry, "num_retracted_requests_total")
    assert count and count == sum(
        answer.stats.num_retractions for answer in harness.answers.values() if answer.stats
    )
    assert value(registry, "evicted_tokens_total") > 0  # type: ignore[operator]


GRAPHS = (GraphSet(0, (1, 2), 0.5, 3 << 30), GraphSet(3, (1,), 0.25, 1 << 30))


def test_steps_that_no_graph_covers_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    harness, registry = make(graphs=GRAPHS)
    assert value(registry, "cuda_graph_eager_steps_total") == 0
    harness.send([1], max_new_tokens=5)
    harness.run()
    assert value(registry, "cuda_graph_eager_steps_total") == 0
    assert harness.state()["cuda_graph_eager_steps"] == 0
    harness.executor.accept_counts.extend([1] * 100)
    for _ in range(3):  # there are graphs for two
        harness.send([1], max_new_tokens=9)
    with caplog.at_level(logging.INFO):
        harness.run()
    state = harness.state()
    # Steps are counted as they ran, the one behind the requests' ends too.
    uncovered = sum(len(plan.decode_slots) == 3 for plan in harness.executor.plans)
    assert state["cuda_graph_eager_steps"] == value(registry, "cuda_graph_eager_steps_total") == uncovered
    assert uncovered >= 4
    assert value(registry, "cuda_graph_passes_total", mode="decode_none") == uncovered
    passes = value(registry, "cuda_graph_passes_total", mode="decode_cuda_graph")
    assert passes == sum(bool(plan.decode_slots) for plan in harness.executor.plans) - uncovered
    assert value(registry, "is_cuda_graph") == float(len(harness.executor.plans[-1].decode_slots) < 3)
    assert value(registry, "graph_memory_usage_gb", phase="plain") == 3
    assert value(registry, "graph_memory_usage_gb", phase="spec_3") == 1
    assert any("cuda graph: False, gen throughput" in r.getMessage() for r in caplog.records)
    assert state["cuda_graphs"] == {
        "plain": {"draft_len": 0, "sizes": [1, 2], "seconds": 0.5, "bytes": 3 << 30},
        "spec": {"draft_len": 3, "sizes": [1], "seconds": 0.25, "bytes": 1 << 30},
    }
    assert state["decode_cuda_graph_bs"] == [1, 2] and state["decode_cuda_graph_memory_gb"] == 4.0


def test_a_cpu_has_no_figures_of_graphs() -> None:
    harness, registry = make()
    harness.send([1], max_new_tokens=5)
    harness.run()
    assert not [name for name in harness.state() if "graph" in name]
    assert "graph" not in generate_latest(registry).decode()


def _exposed(folder: Path) -> str:
    (route,) = metrics_router(folder).routes
    assert isinstance(route, APIRoute)
    return bytes(route.endpoint().body).decode()


def test_multiprocess_files_reach_another_reader(tmp_path: Path) -> None:
    code = (
        "from sglang.srt.managers.prometheus_sink import PrometheusSink, SinkLabels\n"
        "from sglang.srt.managers.metrics import *\n"
        "sink = PrometheusSink(SinkLabels(model_name='m'))\n"
        "sink.constants(EngineConstants(100, 1, 100, 64, 3, 4, 0, 0))\n"
        "sink.decode_step(DecodeReport(3, 2, 5))\n"
        "sink.decided(3, 'cost')\n"
        "sink.interval(IntervalReport(10.0, 2.5, 0.5))\n"
        "sink.interval(IntervalReport(20.0, None, None))\n"
    )
    environment = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    text = _exposed(tmp_path)
    labels = 'engine_type="unified",mode="spec",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="0"'
    assert f"sglang:decode_tokens_total{{{labels}}} 5.0" in text
    assert 'sglang:spec_decisions_total{draft_len="3",' in text and 'reason="cost"' in text
    assert "sglang:gen_throughput{" in text and "\nsglang:spec_accept_length{" not in text


def test_acceptance_ignores_plain_steps() -> None:
    acceptance = Acceptance()
    acceptance.add(DecodeReport(draft_len=0, num_rows=4, num_tokens=4))
    assert acceptance.length is None and acceptance.rate is None
    acceptance.add(DecodeReport(2, 3, 7, 4, 6, (3, 3), (3, 1)))
    acceptance.add(DecodeReport(3, 1, 4, 3, 3, (1, 1, 1), (1, 1, 1)))
    assert acceptance.length == 11 / 4 and acceptance.rate == 7 / 9
    assert acceptance.by_depth == [1.0, 0.5, 1.0]
    assert IntervalReport(1.0, None, None).accept_length is None


def test_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    harness = SchedulerHarness(spec=SpecShape(3), decode_log_interval=4, num_pages=100)
    harness.executor.accept_counts.extend([1] * 100)
    harness.send([1, 2, 3, 4], max_new_tokens=12)
    for _ in range(6):
        harness.step()
    harness.set_state(speculative_disable_bs_threshold=0)
    harness.run()
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0].startswith(
        "Prefill batch, #new-seq: 1, #new-token: 4, #cached-token: 0, token usage: 0.1"
    )
    assert "#running-req: 1, mode: spec(k=3), #token: " in lines[1]
    assert "accept len: 2.00, accept rate: 0.33, gen throughput (token/s): " in lines[1]
    assert lines[1].endswith("#queue-req: 0")
    harness = SchedulerHarness(decode_log_interval=4)
    harness.send([1, 2, 3, 4], max_new_tokens=12)
    harness.run()
    assert "mode" not in caplog.records[-1].getMessage() and "accept" not in caplog.records[-1].getMessage()

"""Logs, files, crash dumps and traces of requests. Run alone: pytest THIS_FILE"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from concurrent import futures
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry import context, trace
from opentelemetry.propagate import extract
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from sglang.srt.entrypoints.admin_api import change_logging
from sglang.srt.entrypoints.watching import make_watching
from sglang.srt.managers.io_struct import FinishReason, RequestStats
from sglang.srt.managers.text_files import CrashDump, RequestFile
from sglang.srt.managers.text_observers import HEALTH_RID, Observers
from sglang.srt.managers.text_request import RequestError, Sample, TextRequest
from sglang.srt.managers.text_request_log import RequestLog, TimeStatsLog
from sglang.srt.managers.text_traces import Traces, make_exporter
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.flags import ServerArgsError

SECRET = "the prompt " + "x" * 3000


def make_sample(rid: str = "r1", prompt: str | list[int] = SECRET) -> Sample:
    request = TextRequest(prompt, SamplingParams(max_new_tokens=7, temperature=0.5), rid)
    sample = Sample(rid, request, [1, 2, 3], asyncio.Event())
    sample.created_ts = 1000.0
    return sample


def end(sample: Sample, finish: FinishReason | None = None, text: str = "an answer") -> Sample:
    sample.text = text
    sample.stats = RequestStats(3, 5, 1, admitted_ts=1000.25, first_token_ts=1000.5)
    sample.end(finish or FinishReason("length", length=5), 1002.5)
    return sample


def lines(caplog: pytest.LogCaptureFixture, what: str) -> list[dict[str, Any]]:
    texts = [record.getMessage() for record in caplog.records]
    return [json.loads(text.removeprefix(f"{what}: ")) for text in texts if text.startswith(f"{what}: ")]


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_each_level_says_more(level: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log = RequestLog(True, level)
    sample = make_sample()
    log.received(sample)
    log.ended(end(sample))
    (came,), (went,) = lines(caplog, "Receive"), lines(caplog, "Finish")
    assert came["rid"] == went["rid"] == "r1" and came["prompt_tokens"] == 3
    assert went["e2e_latency"] == 2.5 and went["queue_time"] == 0.25 and went["completion_tokens"] == 5
    assert went["finish_reason"] == {"type": "length", "length": 5}
    parameters = {"max_new_tokens": 7, "temperature": 0.5} if level >= 1 else None
    assert came.get("sampling_params") == parameters
    assert went.get("text") == ("an answer" if level >= 2 else None)
    shown = {0: None, 1: None, 2: SECRET[:2048] + "…", 3: SECRET}[level]
    assert came.get("prompt") == shown
    assert level >= 2 or SECRET[:10] not in caplog.text


def test_logging_is_changed_while_the_server_runs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log = RequestLog(False, 2)
    log.received(make_sample())
    assert not caplog.records
    assert change_logging(log, {"log_requests": True, "log_requests_level": 0}) == {
        "log_requests": True, "log_requests_level": 0,
    }  # fmt: skip
    log.received(make_sample())
    assert len(lines(caplog, "Receive")) == 1
    for body in ({"log_requests": 1}, {"log_requests_level": 4}, {"dump_requests_folder": "x"}):
        with pytest.raises(RequestError):
            change_logging(log, {"log_requests_level": 3, **body})
    assert (log.enabled, log.level) == (True, 0)


def test_probes_of_health_are_no_requests(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    observers = Observers([RequestLog(True, 3)])
    probe = make_sample(f"{HEALTH_RID}_1")
    observers.received(probe)
    observers.ended(end(probe))
    assert not caplog.records


def test_times_of_a_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    TimeStatsLog().ended(end(make_sample()))
    assert caplog.records[-1].getMessage() == (
        "Req Time Stats(rid=r1, input len=3, output len=5): queue_time: 250.00 ms,"
        " time_to_first_token: 500.00 ms, decode_time: 2000.00 ms, e2e_latency: 2500.00 ms"
    )


# ---- files


def test_a_line_for_every_request(tmp_path: Path) -> None:
    file = RequestFile(tmp_path)
    file.ended(end(make_sample("a")))
    file.ended(end(make_sample("b"), FinishReason("abort", message="no", status_code=503)))
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("sglang-request-metrics-19700101_") and SECRET not in path.read_text()
    first, second = map(json.loads, path.read_text().splitlines())
    assert first["request_parameters"] == {"max_new_tokens": 7, "temperature": 0.5}
    assert (first["rid"], first["timestamp"], second["finish_reason"]["status_code"]) == ("a", 1002.5, 503)


def test_a_full_disk_costs_lines_and_no_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """/dev/full is a disk without room."""
    file = RequestFile(tmp_path)
    name = time.strftime("sglang-request-metrics-%Y%m%d_%H.log", time.localtime(1002.5))
    (tmp_path / name).symlink_to("/dev/full")
    for _ in range(3):
        file.ended(end(make_sample()))
    assert [r.levelname for r in caplog.records] == ["ERROR"] and "No space left" in caplog.text
    (tmp_path / name).unlink()
    file.ended(end(make_sample()))
    assert len((tmp_path / name).read_text().splitlines()) == 1


def test_a_crash_dump_has_what_ran_and_what_had_just_ended(tmp_path: Path) -> None:
    dump = CrashDump(tmp_path / "new" / "folder")
    early, late, running = make_sample("early"), make_sample("late"), make_sample("running", [5, 6])
    for sample in (early, late, running):
        dump.received(sample)
    end(early).finished_ts = 1000.0
    dump.ended(early)
    end(late).finished_ts = 1301.0
    dump.ended(late)
    running.text, running.output_ids = "so far", [8, 9]
    content = dump.content("it broke", {"port": 1, "api_key": "***"})
    dump.ended(end(running))  # told of the failure while the file is being written
    path = dump.write(content)
    assert path is not None
    written = json.loads(path.read_text())
    assert (written["reason"], written["server_args"]["api_key"]) == ("it broke", "***")
    assert [one["rid"] for one in written["finished"]] == ["late"]
    (one,) = written["running"]
    assert (one["prompt"], one["text"], one["output_ids"]) == ([5, 6], "so far", [8, 9])
    assert one["finish_reason"] is None and one["sampling_params"]["temperature"] == 0.5


def test_a_crash_dump_that_can_not_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    assert CrashDump(tmp_path / "file" / "below").write(CrashDump(tmp_path).content("x", {})) is None
    assert "--crash-dump-folder: nothing was written" in caplog.text


# ---- traces


def spans_of(exporter: InMemorySpanExporter, traces: Traces) -> dict[str, ReadableSpan]:
    traces.close()
    return {span.name: span for span in exporter.get_finished_spans()}


def test_a_request_is_a_span_with_its_parts() -> None:
    exporter = InMemorySpanExporter()
    traces = Traces(exporter, "m")
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    token = context.attach(extract({"traceparent": parent}))
    sample = make_sample()
    traces.received(sample)
    context.detach(token)
    traces.ended(end(sample))
    spans = spans_of(exporter, traces)
    times = {name: (span.start_time, span.end_time) for name, span in spans.items()}
    second = 1_000_000_000
    assert times == {
        "generate": (1000 * second, 1002.5 * second),
        "queue": (1000 * second, 1000.25 * second),
        "prefill": (1000.25 * second, 1000.5 * second),
        "decode": (1000.5 * second, 1002.5 * second),
    }
    whole = spans["generate"]
    assert whole.parent is not None and f"{whole.parent.trace_id:032x}" == parent.split("-")[1]
    assert all(span.parent == whole.context for name, span in spans.items() if name != "generate")
    assert whole.attributes is not None
    assert whole.attributes["gen_ai.usage.completion_tokens"] == 5
    assert whole.attributes["gen_ai.latency.time_to_first_token"] == 0.5
    assert SECRET not in str(whole.to_json())


def test_a_failure_is_marked_and_needs_no_parts() -> None:
    exporter = InMemorySpanExporter()
    traces = Traces(exporter, "m")
    sample = make_sample()
    traces.received(sample)
    sample.end(FinishReason("abort", message="queue full", status_code=503), 1001.0)
    traces.ended(sample)
    spans = spans_of(exporter, traces)
    assert set(spans) == {"generate"} and spans["generate"].parent is None
    assert spans["generate"].status.status_code is trace.StatusCode.ERROR


def test_spans_are_sent_over_http() -> None:
    got: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return None

    server = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    traces = Traces(make_exporter(f"http://127.0.0.1:{server.server_port}/v1/traces"), "m")
    traces.ended(end(make_sample()))
    traces.close()
    server.shutdown()
    server.server_close()
    assert got and got[0][0] == "/v1/traces"


def test_spans_are_sent_over_grpc() -> None:
    names: list[str] = []

    class Collector(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, _: Any) -> Any:
            for resource in request.resource_spans:
                names.extend(span.name for scope in resource.scope_spans for span in scope.spans)
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(futures.ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Collector(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    traces = Traces(make_exporter(f"127.0.0.1:{port}"), "m")
    traces.ended(end(make_sample()))
    traces.close()
    server.stop(None)
    assert sorted(names) == ["decode", "generate", "prefill", "queue"]


# ---- flags


def resolved(*line: str) -> ServerArgs:
    return ServerArgs.from_command_line(["--model-path", "m", *line]).resolve("Qwen3ForCausalLM")


def test_flags_make_observers(tmp_path: Path) -> None:
    folder = str(tmp_path)
    args = resolved(
        "--log-requests", "--log-requests-level", "1", "--enable-request-time-stats-logging",
        "--export-metrics-to-file", "--export-metrics-to-file-dir", folder, "--crash-dump-folder", folder,
    )  # fmt: skip
    watching = make_watching(args)
    assert (watching.request_log.enabled, watching.request_log.level) == (True, 1)
    sample = make_sample()
    watching.observers.received(sample)
    content = watching.crash_content("broken", args)
    assert content is not None and len(content["running"]) == 1
    watching.observers.ended(end(sample))
    watching.write_crash(content)
    for thread in threading.enumerate():
        if thread.name == "crash-dump":
            thread.join()
    assert sorted(path.name.split("_")[0] for path in tmp_path.iterdir()) == [
        "crash", "sglang-request-metrics-19700101",
    ]  # fmt: skip
    assert make_watching(resolved()).crash_content("broken", args) is None


def test_traces_without_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolved("--enable-trace").enable_trace
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ServerArgsError, match=r"pip install 'sglang-toggle\[trace\]'"):
        resolved("--enable-trace")


@pytest.mark.parametrize(
    "line, words",
    [
        ("--log-requests-level 4", "from 0 to 3"),
        ("--export-metrics-to-file", "need each other"),
        ("--export-metrics-to-file --export-metrics-to-file-dir nowhere", "nowhere is not a folder"),
        ("--crash-dump-folder /dev/null/dumps", "/dev/null/dumps can't be made: Not a directory"),
        ("--max-request-body-mb 0", "at least 1"),
        ("--drain-timeout -1", "at least 0"),
        ("--watchdog-timeout -1", "at least 0"),
        ("--soft-watchdog-timeout 0", "above 0"),
        ("--fastapi-root-path below", "begin with /"),
        ("--api-key a --admin-api-key a", "the same"),
        ("--admin-api-key ü", "printable ASCII"),
    ],
)
def test_values_that_can_not_be(line: str, words: str) -> None:
    with pytest.raises(ServerArgsError, match=words):
        resolved(*line.split())


def test_a_request_without_logs_is_in_no_log_and_no_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    sample = make_sample()
    sample.request = replace(sample.request, no_logs=True)
    dump = CrashDump(tmp_path)
    for observer in (RequestLog(True, 3), TimeStatsLog(), RequestFile(tmp_path), dump):
        observer.received(sample)
    running = json.dumps(dump.content("why", {}))
    end(sample)
    for observer in (RequestLog(True, 3), TimeStatsLog(), RequestFile(tmp_path), dump):
        observer.ended(sample)
    assert not caplog.records and not list(tmp_path.iterdir())
    for content in (running, json.dumps(dump.content("why", {}))):
        assert "r1" in content and SECRET[:10] not in content and "an answer" not in content

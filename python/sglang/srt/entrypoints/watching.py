"""From the flags to those who watch requests, and their end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang.srt.configs.metrics_args import parse_labels, token_borders
from sglang.srt.managers.text_files import CrashDump, RequestFile
from sglang.srt.managers.text_metrics import PrometheusTextMetrics, TextMetricsSettings
from sglang.srt.managers.text_observers import Observers, TextObserver
from sglang.srt.managers.text_request_log import RequestLog, TimeStatsLog
from sglang.srt.server_args import ServerArgs


class Watching:
    def __init__(
        self,
        observers: Observers,
        request_log: RequestLog,
        crash: CrashDump | None,
        started: Callable[[float], None],
        close: Callable[[], None],
    ) -> None:
        self.observers = observers
        self.request_log = request_log
        self.started = started  # with how long the start took
        self.close = close  # called once
        self._crash = crash

    def crash_content(self, reason: str, args: ServerArgs) -> dict[str, Any] | None:
        """Before the requests are told of it: they are complete then, and run no more."""
        return None if self._crash is None else self._crash.content(reason, args.public_dict())

    def write_crash(self, content: dict[str, Any] | None) -> None:
        """In a thread that the process waits for: clients hear of the failure meanwhile."""
        if self._crash is not None and content is not None:
            threading.Thread(target=self._crash.write, args=(content,), name="crash-dump").start()


def make_watching(args: ServerArgs) -> Watching:
    request_log = RequestLog(args.log_requests, args.log_requests_level)
    crash = None if args.crash_dump_folder is None else CrashDump(Path(args.crash_dump_folder))
    observers: list[TextObserver] = [request_log]
    close: Callable[[], None] = _nothing
    assert args.served_model_name is not None
    metrics = PrometheusTextMetrics(metrics_settings(args)) if args.enable_metrics else None
    if metrics is not None:
        observers.append(metrics)
    if args.enable_request_time_stats_logging:
        observers.append(TimeStatsLog())
    if args.export_metrics_to_file_dir is not None:
        observers.append(RequestFile(Path(args.export_metrics_to_file_dir)))
    if crash is not None:
        observers.append(crash)
    if args.enable_trace:
        from sglang.srt.managers.text_traces import Traces, make_exporter

        traces = Traces(make_exporter(args.otlp_traces_endpoint), args.served_model_name)
        observers.append(traces)
        close = traces.close
    started = _ignore if metrics is None else metrics.started
    return Watching(Observers(observers), request_log, crash, started, close)


def metrics_settings(args: ServerArgs) -> TextMetricsSettings:
    assert args.served_model_name is not None
    values: dict[str, Any] = {
        "first_token": args.bucket_time_to_first_token,
        "between": args.bucket_inter_token_latency,
        "end_to_end": args.bucket_e2e_request_latency,
    }
    if args.collect_tokens_histogram:
        values["prompt_tokens"] = token_borders("--prompt-tokens-buckets", args.prompt_tokens_buckets)
        values["output_tokens"] = token_borders("--generation-tokens-buckets", args.generation_tokens_buckets)
    return TextMetricsSettings(
        model_name=args.served_model_name,
        extra_labels=tuple(parse_labels(args.extra_metric_labels).items()),
        custom_labels=args.tokenizer_metrics_allowed_custom_labels or (),
        **{name: value for name, value in values.items() if value is not None},
    )


def _ignore(_: float) -> None:
    return None


def _nothing() -> None:
    return None

"""The flags of running a server: who may ask, what is refused, how it stops. ``ServerArgs`` inherits them."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sglang.srt.configs.metrics_args import (
    CUSTOM_LABELS_HEADER,
    check_borders,
    check_custom_labels,
    parse_labels,
    token_borders,
)
from sglang.srt.utils.flags import ServerArgsError, flag, option_name

LOG_LEVELS: Final = ("debug", "info", "warning", "error", "critical")


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationsArgs:
    api_key: str | None = flag(
        None, str, "HTTP server", "clients must send it as a bearer token, or as x-api-key"
    )
    admin_api_key: str | None = flag(
        None,
        str,
        "HTTP server",
        "key of what changes the server (/set_internal_state, /flush_cache, /pause_generation,"
        " /configure_logging, ending all requests …), which --api-key then does not open",
    )
    max_request_body_mb: int = flag(
        64, int, "HTTP server", "megabytes a request's body may have; more is refused with status 413"
    )
    enable_return_hidden_states: bool = flag(
        False,
        bool,
        "HTTP server",
        "requests may ask for hidden states (return_hidden_states), which are large",
    )
    fastapi_root_path: str | None = flag(
        None, str, "HTTP server", "path below which a proxy serves this server"
    )
    drain_timeout: float = flag(
        20.0,
        float,
        "HTTP server",
        "on SIGTERM: seconds that running requests have to end, while new ones are refused with status 503",
    )
    watchdog_timeout: float = flag(
        300.0, float, "faults", "seconds after which a step that does not end ends the server; 0: none"
    )
    soft_watchdog_timeout: float | None = flag(
        None, float, "faults", "seconds after which such a step is logged, with the stack of every thread"
    )
    crash_dump_folder: str | None = flag(
        None,
        str,
        "faults",
        "folder for a JSON file, written when the server fails, of the requests that run and of those that"
        " ended in the five minutes before; it holds their texts",
    )
    log_requests: bool = flag(
        False, bool, "observability", "log every request as it comes and as it ends (--log-requests-level)"
    )
    log_requests_level: int = flag(
        2,
        int,
        "observability",
        "0: figures; 1: sampling parameters too; 2: the first 2048 characters of prompt and answer too;"
        " 3: all of both",
    )
    enable_request_time_stats_logging: bool = flag(
        False, bool, "observability", "log how long each request waited and ran"
    )
    export_metrics_to_file: bool = flag(
        False, bool, "observability", "write a JSON line for every request (no texts), a file an hour"
    )
    export_metrics_to_file_dir: str | None = flag(
        None, str, "observability", "folder of these files; needed by --export-metrics-to-file"
    )
    bucket_time_to_first_token: tuple[float, ...] | None = flag(
        None, float, "observability", "borders of this histogram in seconds (default: SGLang's)", many=True
    )
    bucket_inter_token_latency: tuple[float, ...] | None = flag(
        None, float, "observability", "borders of this histogram in seconds (default: SGLang's)", many=True
    )
    bucket_e2e_request_latency: tuple[float, ...] | None = flag(
        None, float, "observability", "borders of this histogram in seconds (default: SGLang's)", many=True
    )
    collect_tokens_histogram: bool = flag(
        False, bool, "observability", "histograms of the tokens of prompts and answers"
    )
    prompt_tokens_buckets: tuple[str, ...] | None = flag(
        None,
        str,
        "observability",
        "borders of the prompts' histogram: default; custom 100 200 …; or tse MIDDLE BASE COUNT, which lie at"
        " distances of BASE, its square, … on both sides of MIDDLE",
        many=True,
    )
    generation_tokens_buckets: tuple[str, ...] | None = flag(
        None, str, "observability", "as --prompt-tokens-buckets, of the answers", many=True
    )
    extra_metric_labels: str | None = flag(
        None, str, "observability", 'labels of every metric of requests and steps, as JSON: {"zone": "a"}'
    )
    tokenizer_metrics_allowed_custom_labels: tuple[str, ...] | None = flag(
        None,
        str,
        "observability",
        "names of labels of the requests' metrics whose values requests may bring: in the header below, or as"
        ' custom_labels of /generate. Beyond 30 combinations of values, further ones count as "other"',
        many=True,
    )
    tokenizer_metrics_custom_labels_header: str = flag(
        CUSTOM_LABELS_HEADER,
        str,
        "observability",
        'header that has them, as JSON: {"team": "a"}; other names in it are passed over',
    )
    enable_trace: bool = flag(
        False,
        bool,
        "observability",
        "OpenTelemetry: a span for every request, below the client's where it sends a traceparent header",
    )
    otlp_traces_endpoint: str = flag(
        "localhost:4317",
        str,
        "observability",
        "who collects the spans: HOST:PORT (gRPC) or http://HOST:4318/v1/traces",
    )
    log_level_http: str | None = flag(
        None,
        str,
        "observability",
        "what the HTTP server logs; info: a line for every request (default: warning)",
        choices=LOG_LEVELS,
    )
    config: str | None = flag(
        None,
        str,
        "configuration file",
        "YAML file of flags (tp-size: 2); what the command line says comes first",
    )


def check_operations(args: OperationsArgs) -> None:
    """
    Raises:
        ServerArgsError: a value that can't be.
    """
    if args.max_request_body_mb < 1:
        raise ServerArgsError(f"--max-request-body-mb must be at least 1, got {args.max_request_body_mb}")
    if not args.drain_timeout >= 0:
        raise ServerArgsError(f"--drain-timeout must be at least 0 (seconds), got {args.drain_timeout}")
    if not args.watchdog_timeout >= 0:
        raise ServerArgsError(f"--watchdog-timeout must be at least 0 (none), got {args.watchdog_timeout}")
    soft = args.soft_watchdog_timeout
    if soft is not None and not soft > 0:
        raise ServerArgsError(f"--soft-watchdog-timeout must be above 0, got {soft}")
    check_observability(args)
    path = args.fastapi_root_path
    if path is not None and (not path.startswith("/") or path.endswith("/")):
        raise ServerArgsError(f"--fastapi-root-path must begin with / and not end with one, got {path}")
    if args.api_key is not None and args.api_key == args.admin_api_key:
        raise ServerArgsError("--api-key and --admin-api-key are the same: leave one of them out")
    for name in ("api_key", "admin_api_key"):
        key = getattr(args, name)
        if key is not None and not (key.isascii() and key.isprintable() and key == key.strip()):
            raise ServerArgsError(
                f"--{name.replace('_', '-')} must be printable ASCII without blanks at its ends:"
                " clients send it in a header"
            )


_TRACE_PACKAGES: Final = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto")


def check_observability(args: OperationsArgs) -> None:
    """
    Raises:
        ServerArgsError: a value that can't be, or something that is not installed.
    """
    if not 0 <= args.log_requests_level <= 3:
        raise ServerArgsError(f"--log-requests-level must be from 0 to 3, got {args.log_requests_level}")
    folder = args.export_metrics_to_file_dir
    if args.export_metrics_to_file != (folder is not None):
        raise ServerArgsError("--export-metrics-to-file and --export-metrics-to-file-dir need each other")
    if folder is not None and not Path(folder).is_dir():
        raise ServerArgsError(f"--export-metrics-to-file-dir {folder} is not a folder")
    if args.crash_dump_folder is not None:
        try:  # now: after a crash it would be too late
            Path(args.crash_dump_folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ServerArgsError(
                f"--crash-dump-folder {args.crash_dump_folder} can't be made: {error.strerror}"
            ) from None
    for name in ("bucket_time_to_first_token", "bucket_inter_token_latency", "bucket_e2e_request_latency"):
        check_borders(option_name(name), getattr(args, name))
    token_borders("--prompt-tokens-buckets", args.prompt_tokens_buckets)
    token_borders("--generation-tokens-buckets", args.generation_tokens_buckets)
    given = args.prompt_tokens_buckets or args.generation_tokens_buckets
    if given is not None and not args.collect_tokens_histogram:
        raise ServerArgsError("borders of the tokens' histograms need --collect-tokens-histogram")
    own = parse_labels(args.extra_metric_labels)
    check_custom_labels(
        args.tokenizer_metrics_allowed_custom_labels, args.tokenizer_metrics_custom_labels_header, own
    )
    if args.enable_trace and not all(_is_installed(name) for name in _TRACE_PACKAGES):
        raise ServerArgsError("--enable-trace needs packages: pip install 'sglang-toggle[trace]'")


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package above it
        return False

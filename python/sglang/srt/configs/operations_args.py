"""The flags of running a server: who may ask, what is refused, how it stops. ``ServerArgs`` inherits them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sglang.srt.utils.flags import ServerArgsError, flag

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

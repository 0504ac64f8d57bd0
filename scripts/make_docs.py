"""Writes the documents that are made from the code: docs/server_arguments.md and the Grafana dashboard.

python scripts/make_docs.py, or make docs. A test says whether they are current.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.flags import Flag, flags_of, option_name
from sglang.srt.utils.upstream_flags import refused_flags

DOCS: Final = Path(__file__).resolve().parents[1] / "docs"
ARGUMENTS: Final = DOCS / "server_arguments.md"
DASHBOARD: Final = DOCS / "grafana" / "sglang_toggle.json"

_HEAD: Final = """# Flags of the server

Made by `make docs` from the one table of flags (`python/sglang/srt/server_args.py` and the class it
inherits); `python -m sglang.launch_server --help` says the same. `--config FILE` takes them from a YAML file,
under the same names; what the command line says comes first. `sglang.Engine` takes them as keywords, with `_`
for `-`.

Two limits are set by the environment, as in SGLang: `SGLANG_REQ_WAITING_TIMEOUT` and
`SGLANG_REQ_RUNNING_TIMEOUT` (seconds; unset: none) end a request with status 503 that has waited, or run, for
longer; a pause counts.
`SGLANG_RETURN_ORIGINAL_LOGPROB=1` leaves a request's temperature out of its log-probabilities
([logprobs.md](logprobs.md)).
"""


def server_arguments() -> str:
    groups: dict[str, list[str]] = {}
    for name, (row, default) in flags_of(ServerArgs).items():
        groups.setdefault(row.group, []).append(_line(name, row, default))
    parts = [_HEAD]
    for group, lines in groups.items():
        title = group[0].upper() + group[1:]
        parts.append(f"\n## {title}\n\n| flag | value | default | what it does |\n|---|---|---|---|\n")
        parts.append("\n".join(lines) + "\n")
    parts.append(_refused())
    return "".join(parts)


def _line(name: str, row: Flag, default: Any) -> str:
    names = ", ".join(f"`{option}`" for option in (option_name(name), *row.aliases))
    if row.kind is bool:
        return f"| {names} | | off | {_cell(row.help)} |"
    kind = " \\| ".join(f"`{choice}`" for choice in row.choices) if row.choices else row.kind.__name__
    shown = "" if default is None else f"`{default}`"
    return f"| {names} | {kind}{' …' if row.many else ''} | {shown} | {_cell(row.help)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _refused() -> str:
    hints: dict[str, list[str]] = {}
    for option, reason in refused_flags().items():
        hints.setdefault(reason.split(": ", 1)[1], []).append(f"`{option}`")
    lines = [f"| {_cell(hint)} | {', '.join(options)} |" for hint, options in hints.items()]
    head = "\n## Refused by name\n\nWhat SGLang has and this server does not, and what it says to each.\n\n"
    return head + "| hint | flags |\n|---|---|\n" + "\n".join(lines) + "\n"


# ---- Grafana

_BY: Final = '{model_name="$model"}'


def _rate(name: str, labels: str = "", by: str = "") -> str:
    selector = f'{{model_name="$model"{labels}}}'
    return f"sum{by}(rate(sglang:{name}{selector}[$__rate_interval]))"


def _quantile(part: float, name: str) -> str:
    return f"histogram_quantile({part}, {_rate(f'{name}_bucket', by=' by (le)')})"


def _tails(name: str) -> tuple[tuple[str, str], ...]:
    return (_quantile(0.5, name), "p50"), (_quantile(0.99, name), "p99")


# Title, unit, and expressions with their legends.
_PANELS: Final[tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...]] = (
    ("Requests", "short", (
        (f"sum(sglang:num_running_reqs{_BY})", "running"), (f"sum(sglang:num_queue_reqs{_BY})", "queued"),
        (f"sum(sglang:num_grammar_queue_reqs{_BY})", "grammar compiling"),
        (f"sum(sglang:num_paused_reqs{_BY})", "paused"),
    )),
    ("Decode steps by mode", "ops", ((_rate("decode_steps_total", by=" by (mode)"), "{{mode}}"),)),
    ("Why a step has its mode", "ops", (
        (_rate("spec_decisions_total", by=" by (draft_len, reason)"), "{{draft_len}} drafts: {{reason}}"),
    )),
    ("Switches of mode", "ops", (
        (_rate("spec_switches_total", by=" by (to, reason)"), "to {{to}}: {{reason}}"),
    )),
    ("Draft length and accepted length", "short", (
        (f"max(sglang:spec_draft_len{_BY})", "drafts of the last step"),
        (f"max(sglang:spec_accept_length{_BY})", "tokens of a verified row"),
    )),
    ("Part of the drafts accepted", "percentunit", ((f"max(sglang:spec_accept_rate{_BY})", "accepted"),)),
    ("Tokens per second", "short", (
        (_rate("generation_tokens_total"), "generated"),
        (_rate("realtime_tokens_total", by=" by (mode)"), "{{mode}}"),
    )),
    ("Time to first token", "s", _tails("time_to_first_token_seconds")),
    ("Between two tokens", "s", _tails("inter_token_latency_seconds")),
    ("Whole request", "s", _tails("e2e_request_latency_seconds")),
    ("Time in the queue", "s", _tails("queue_time_seconds")),
    ("KV cache in use", "percentunit", (
        (f"max(sglang:token_usage{_BY})", "in use"),
        (f"max(sglang:cache_hit_rate{_BY})", "hits of the last prefill"),
    )),
    ("How busy it is", "percentunit", (
        (f"max(sglang:utilization{_BY})", "of the requests that can run"),
        (f"max(sglang:fwd_occupancy{_BY}) / 100", "of the time the device works"),
    )),
    ("Retractions and evictions", "ops", (
        (_rate("num_retracted_requests_total"), "retracted requests"),
        (_rate("evicted_tokens_total"), "evicted tokens"),
    )),
    ("Answers by status", "ops", ((
        "sum by (status_code)(rate(sglang:http_responses_total[$__rate_interval]))", "{{status_code}}"
    ),)),
    ("Decode steps without a CUDA graph", "ops", ((_rate("cuda_graph_eager_steps_total"), "eager"),)),
)  # fmt: skip


def dashboard() -> str:
    panels = [_panel(number, *panel) for number, panel in enumerate(_PANELS)]
    source = {"type": "prometheus", "uid": "${datasource}"}
    model = {
        "name": "model",
        "type": "query",
        "datasource": source,
        "query": "label_values(sglang:num_running_reqs, model_name)",
        "refresh": 2,
    }
    content = {
        "title": "sglang: speculative and plain decoding",
        "uid": "sglang-toggle",
        "schemaVersion": 39,
        "refresh": "5s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [{"name": "datasource", "type": "datasource", "query": "prometheus"}, model]},
        "panels": panels,
    }
    return json.dumps(content, indent=1) + "\n"


def _panel(number: int, title: str, unit: str, lines: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "id": number + 1,
        "title": title,
        "type": "timeseries",
        "datasource": source,
        "gridPos": {"x": number % 3 * 8, "y": number // 3 * 8, "w": 8, "h": 8},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": source, "expr": expression, "legendFormat": legend}
            for i, (expression, legend) in enumerate(lines)
        ],
    }


def main() -> None:
    DASHBOARD.parent.mkdir(exist_ok=True)
    ARGUMENTS.write_text(server_arguments(), encoding="utf-8")
    DASHBOARD.write_text(dashboard(), encoding="utf-8")


if __name__ == "__main__":
    main()

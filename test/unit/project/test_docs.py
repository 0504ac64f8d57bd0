"""Documents made from the code are current, and name only what there is. Run alone: pytest THIS_FILE"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry

from sglang.srt.managers.metrics import EngineConstants
from sglang.srt.managers.prometheus_sink import PrometheusSink, SinkLabels
from sglang.srt.managers.text_metrics import PrometheusTextMetrics, TextMetricsSettings
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.flags import flags_of, option_name

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))  # for scripts

from scripts import make_docs  # noqa: E402

METRIC = re.compile(r"sglang:[a-z0-9_]+")
HTTP = {"sglang:http_requests_total", "sglang:http_responses_total"}  # of middleware.py


@pytest.mark.parametrize(
    "path, make",
    [(make_docs.ARGUMENTS, make_docs.server_arguments), (make_docs.DASHBOARD, make_docs.dashboard)],
)
def test_documents_are_current(path: Path, make: object) -> None:
    assert callable(make)
    assert path.read_text(encoding="utf-8") == make(), f"{path.name} is not current: run make docs"


@pytest.fixture(scope="module")
def served() -> set[str]:
    """The names of all samples that a server with a drafter and a GPU can have."""
    registry = CollectorRegistry()
    sink = PrometheusSink(SinkLabels(model_name="m"), registry)
    sink.constants(EngineConstants(100, 1, 100, 64, 3, 4, 0, 0, True, (("plain", 1),)))
    PrometheusTextMetrics(
        TextMetricsSettings(model_name="m", prompt_tokens=(1,), output_tokens=(1,)), registry
    )
    return set(registry._names_to_collectors) | HTTP


def strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from strings(one)
    elif isinstance(value, list):
        for one in value:
            yield from strings(one)


def test_the_dashboard_shows_what_is_served(served: set[str]) -> None:
    dashboard = json.loads(make_docs.DASHBOARD.read_text())
    names = set(METRIC.findall(" ".join(strings(dashboard))))
    assert len(names) > 20 and names <= served
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in dashboard["panels"]:
        assert panel["targets"]
        for target in panel["targets"]:
            assert balanced(target["expr"]), target["expr"]
            labels = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert labels <= set(re.findall(r"\w+", target["expr"])), "a legend's label is not in its sum"


def test_alert_rules_are_rules_about_what_is_served(served: set[str]) -> None:
    content = yaml.safe_load((ROOT / "docs" / "alerts.yml").read_text())
    rules = [rule for group in content["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules) >= 8
    for rule in rules:
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"\d+m", rule["for"]) and rule["labels"]["severity"] in ("page", "warn", "info")
        assert set(rule["annotations"]) == {"summary", "description"}
        assert balanced(rule["expr"]), rule["expr"]
        names = set(METRIC.findall(" ".join(strings(rule))))
        assert names <= served and (names or rule["alert"] == "SglangDown")
        known = {option_name(name) for name in flags_of(ServerArgs)}
        assert set(re.findall(r"--[a-z-]+", rule["annotations"]["description"])) <= known


def balanced(expression: str) -> bool:
    closing = {")": "(", "]": "[", "}": "{"}
    stack: list[str] = []
    for character in re.sub(r'"[^"]*"', "", expression):
        if character in closing.values():
            stack.append(character)
        elif character in closing and (not stack or stack.pop() != closing[character]):
            return False
    return not stack


def test_the_check_of_names_can_fail(served: set[str]) -> None:
    assert "sglang:no_such_thing" not in served and "sglang:token_usage" in served
    assert not balanced("rate(x[5m)") and balanced('sum(rate(x{a="("}[5m]))')


def test_every_flag_is_tried_by_a_test() -> None:
    """By its name or an alias, or by its field's name as a keyword."""
    this = Path(__file__).resolve()
    texts = [p.read_text() for p in sorted((ROOT / "test").rglob("*.py")) if p.resolve() != this]
    words = set(re.findall(r"--[a-z0-9-]+|\b[a-z_0-9]+(?==)", "\n".join(texts)))
    untried = [
        option_name(name)
        for name, (row, _) in flags_of(ServerArgs).items()
        if not words & {option_name(name), name, *row.aliases}
    ]
    assert untried == []


def test_every_fault_of_the_document_has_its_test() -> None:
    text = (ROOT / "docs" / "faults.md").read_text()
    tests = set(re.findall(r"`(test_\w+)`", text))
    defined = set()
    for path in (ROOT / "test").rglob("test_*.py"):
        defined |= set(re.findall(r"def (test_\w+)", path.read_text()))
    assert len(tests) >= 10 and tests <= defined, tests - defined

"""Labels of metrics that requests bring, through any endpoint. Run alone: pytest THIS_FILE"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest
from helpers.chat_desk import ChatDesk

from sglang.srt.managers.text_request import Sample

HELLO = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"text": "a"},
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": ["a", "b"]},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"max_tokens": 4, "messages": HELLO},
}


class LabelDesk(ChatDesk):
    """Notes the labels of what it is asked."""

    def __init__(self, folder: Path, **args: Any) -> None:
        super().__init__(folder, **args)
        self.pieces = ["a"]
        self.labels: list[tuple[str, ...]] = []
        received = self.manager._observer.received

        def note(sample: Sample) -> None:
            self.labels.append(sample.request.labels)
            received(sample)

        self.manager._observer.received = note  # type: ignore[method-assign]

    def send(self, path: str, body: dict[str, Any], header: str | None, name: str) -> httpx2.Response:
        async def ask() -> httpx2.Response:
            async with self.client() as client:
                return await client.post(path, json=body, headers={} if header is None else {name: header})

        return self.run(ask())


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> LabelDesk:
    names = {"tokenizer_metrics_allowed_custom_labels": ("team", "app")}
    return LabelDesk(tmp_path_factory.mktemp("desk"), **names)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "header, values",
    [
        (None, ("", "")),
        ("{}", ("", "")),
        ('{"app": "x", "unknown": 3}', ("", "x")),
        (json.dumps({"app": "é", "team": "t" * 128}), ("t" * 128, "é")),
    ],
)
def test_the_header_of_any_request(
    desk: LabelDesk, path: str, header: str | None, values: tuple[str, ...]
) -> None:
    desk.labels.clear()
    assert desk.send(path, BODIES[path], header, "X-Custom-Labels").status_code == 200
    assert desk.labels == [values] * (2 if path == "/v1/completions" else 1)


def test_the_body_of_generate_comes_before_the_header(desk: LabelDesk) -> None:
    desk.labels.clear()
    body = {"text": ["a", "b"], "custom_labels": {"team": "body"}}
    answer = desk.send("/generate", body, '{"team": "header", "app": "header"}', "x-custom-labels")
    assert answer.status_code == 200 and desk.labels == [("body", "header")] * 2


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "header", ["{", "3", "[]", '{"team": 3}', json.dumps({"app": "x" * 129}), '{"app": "\\n"}']
)
def test_a_wrong_header_is_refused(desk: LabelDesk, path: str, header: str) -> None:
    answer = desk.send(path, BODIES[path], header, "x-custom-labels")
    assert answer.status_code == 400 and "x-custom-labels" in answer.text


@pytest.mark.parametrize(
    "labels", [{"other": "x"}, {"team": []}, "team", [{"team": "a"}], {"team": "a", "b": ""}]
)
def test_a_wrong_body_is_refused(desk: LabelDesk, labels: Any) -> None:
    answer = desk.post("/generate", {"text": "a", "custom_labels": labels})
    assert answer.status_code == 400 and "custom_labels" in answer.text and "team" in answer.text


def test_without_allowed_names_there_are_none(tmp_path: Path) -> None:
    desk = LabelDesk(tmp_path)
    assert desk.send("/generate", {"text": "a"}, "{", "x-custom-labels").status_code == 200
    assert desk.post("/generate", {"text": "a", "custom_labels": {}}).status_code == 200
    answer = desk.post("/generate", {"text": "a", "custom_labels": {"team": "x"}})
    assert answer.status_code == 400 and "--tokenizer-metrics-allowed-custom-labels" in answer.text
    assert desk.labels == [(), ()]


def test_a_header_of_another_name(tmp_path: Path) -> None:
    names = {"tokenizer_metrics_allowed_custom_labels": ("team",)}
    desk = LabelDesk(tmp_path, **names, tokenizer_metrics_custom_labels_header="x-mine")
    for header, values in (("x-mine", ("a",)), ("x-custom-labels", ("",))):
        assert desk.send("/generate", {"text": "a"}, '{"team": "a"}', header).status_code == 200
        assert desk.labels.pop() == values

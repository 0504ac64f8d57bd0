"""The served OpenAPI says what the server takes. Run alone: pytest THIS_FILE"""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest
from helpers.chat_desk import ChatDesk
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.entrypoints.openapi import OPERATIONS
from sglang.srt.entrypoints.openapi_schemas import FORMS, RANGES, body_schemas
from sglang.srt.sampling.sampling_params import SamplingParams, SamplingParamsError


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> ChatDesk:
    made = ChatDesk(tmp_path_factory.mktemp("desk"))
    made.pieces = ["x"]
    return made


@pytest.fixture(scope="module")
def document(desk: ChatDesk) -> Any:
    return desk.ask("GET", "/openapi.json").json()


def operations(document: Any) -> list[tuple[str, str, Any]]:
    paths = document["paths"].items()
    return [(path, method, found) for path, methods in paths for method, found in methods.items()]


def test_every_route_is_described(document: Any) -> None:
    assert set(document["paths"]) <= set(OPERATIONS)
    assert set(OPERATIONS) - set(document["paths"]) == {"/metrics"}  # served with --enable-metrics alone
    ids = [found["operationId"] for _, _, found in operations(document)]
    assert len(set(ids)) == len(ids) > 30
    posts = [(path, found) for path, method, found in operations(document) if method == "post"]
    bare = [path for path, found in posts if "requestBody" not in found]
    assert bare == ["/flush_cache", "/v1/responses/{response_id}/cancel"]


def test_every_reference_leads_somewhere(document: Any) -> None:
    names = set(re.findall(r"'#/components/schemas/(\w+)'", repr(document)))
    assert names <= set(document["components"]["schemas"])
    assert {"ChatBody", "GenerateBody", "SamplingParams"} <= names


def test_ids_are_those_of_the_vocabulary(document: Any, desk: ChatDesk) -> None:
    ids = document["components"]["schemas"]["GenerateBody"]["properties"]["input_ids"]["anyOf"][0]
    largest = ids["items"]["maximum"]
    body = {"sampling_params": {"max_new_tokens": 1}}
    assert desk.post("/generate", {**body, "input_ids": [largest]}).status_code == 200
    assert desk.post("/generate", {**body, "input_ids": [largest + 1]}).status_code == 400
    assert desk.post("/generate", {**body, "input_ids": [largest], "text": "a"}).status_code == 400


def test_sampling_parameters_are_all_there() -> None:
    assert set(SCHEMAS["SamplingParams"]["properties"]) == {field.name for field in fields(SamplingParams)}
    described = {name for body in SCHEMAS.values() for name in body.get("properties", {})}
    assert set(RANGES) | set(FORMS) <= described


SCHEMAS = body_schemas()
BOUNDED = sorted(set(RANGES) & {field.name for field in fields(SamplingParams)})


def kind_of(name: str) -> str:
    schema = SCHEMAS["SamplingParams"]["properties"][name]
    branches = schema.get("anyOf", [schema])
    return str(next(branch["type"] for branch in branches if branch["type"] != "null"))


def is_accepted(name: str, value: Any) -> bool:
    try:
        SamplingParams.from_dict({name: value}, {"max_new_tokens": None})
    except SamplingParamsError:
        return False
    return True


@settings(max_examples=60)
@given(st.sampled_from(BOUNDED), st.data())
def test_a_range_is_the_one_that_is_checked(name: str, data: st.DataObject) -> None:
    bounds, whole = RANGES[name], kind_of(name) == "integer"
    low, high = bounds.get("minimum", bounds.get("exclusiveMinimum")), bounds["maximum"]
    inside = data.draw(st.integers(low, high) if whole else st.floats(low, high))
    step = data.draw(st.integers(1, 1000)) if whole else data.draw(st.floats(0.01, 1000)) * max(1.0, high)
    assert is_accepted(name, inside) or inside == bounds.get("exclusiveMinimum")
    assert not is_accepted(name, high + step)
    assert not is_accepted(name, low - step)
    assert is_accepted(name, low) == ("minimum" in bounds)

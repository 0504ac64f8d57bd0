"""Endpoints that only SGLang has, and /v1/loads. Run alone: pytest THIS_FILE"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from helpers.chat_desk import ChatDesk

from sglang.srt.entrypoints.absent_api import ABSENT
from sglang.srt.managers.io_struct import ControlReply, GetStateRequest

STATE: dict[str, Any] = {
    "num_running_reqs": 3,
    "num_queue_reqs": 2,
    "effective_max_running_requests_per_dp": 12,
    "last_gen_throughput": 55.5,
    "memory_usage": {"weight": 1.5, "kvcache": 2.5, "token_capacity": 1000},
    "live": {"kv_used_tokens": 250, "num_grammar_queue_reqs": 1, "num_pending_tokens": 70},
}
SPEC = {"spec_accept_by_position": [0.5], "avg_spec_accept_length": 2.5, "avg_spec_accept_rate": 0.5}


class BusyDesk(ChatDesk):
    """Also tells how busy its scheduler is."""

    state = STATE

    def _take(self, message: Any) -> None:
        if isinstance(message, GetStateRequest):
            assert message.after_step is not None
            reply = ControlReply(message.request_id, ok=True, body=self.state)
            asyncio.get_running_loop().call_soon(self.manager.receive, reply)
        else:
            super()._take(message)


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> BusyDesk:
    return BusyDesk(tmp_path_factory.mktemp("desk"))


def test_what_is_absent_is_refused_by_name(desk: BusyDesk) -> None:
    paths = set(desk.ask("GET", "/openapi.json").json()["paths"])
    assert not paths & set(ABSENT)
    for path, hint in ABSENT.items():
        for method in ("GET", "POST"):
            answer = desk.ask(method, path, {} if method == "POST" else None)
            told = answer.json()
            message = told["message"] if path.startswith("/v1/") else told["error"]["message"]
            assert answer.status_code == 404
            assert path in message and hint in message
    assert desk.ask("GET", "/v1/nothing").json()["message"] == "Not Found"


def test_loads(desk: BusyDesk) -> None:
    desk.state = STATE
    answer = desk.ask("GET", "/v1/loads").json()
    (load,) = answer["loads"]
    assert (load["num_running_reqs"], load["num_waiting_reqs"], load["num_used_tokens"]) == (3, 2, 250)
    assert (load["token_usage"], load["utilization"], load["gen_throughput"]) == (0.25, 0.25, 55.5)
    assert load["queues"] == {"waiting": 2, "grammar": 1, "paused": 0}
    assert load["memory"] == {"weight_gb": 1.5, "kv_cache_gb": 2.5, "graph_gb": 0.0, "token_capacity": 1000}
    assert load["disaggregation"] == {"mode": "null"} and "speculative" not in load
    desk.state = STATE | SPEC
    spec = desk.ask("GET", "/v1/loads?include=core,spec").json()["loads"][0]
    assert spec["speculative"] == {"accept_length": 2.5, "accept_rate": 0.5}
    assert "memory" not in spec and spec["num_running_reqs"] == 3
    (early,) = desk.ask("GET", "/get_load").json()
    assert early.pop("ts_tic") > 0
    counts = {"num_reqs": 5, "num_waiting_reqs": 2, "num_tokens": 250, "num_pending_tokens": 70}
    assert early == {"dp_rank": 0, **counts}


def test_loads_for_prometheus(desk: BusyDesk) -> None:
    desk.state = STATE | SPEC
    answer = desk.ask("GET", "/v1/loads?format=prometheus")
    assert answer.headers["content-type"].startswith("text/plain")
    lines = answer.text.splitlines()
    assert 'sglang_num_running_reqs{dp_rank="0"} 3' in lines
    assert 'sglang_spec_accept_length{dp_rank="0"} 2.5' in lines
    assert 'sglang_queues_waiting{dp_rank="0"} 2' in lines
    assert len(lines) % 2 == 0


@pytest.mark.parametrize(
    "query, word", [("include=core,x", "'x'"), ("dp_rank=1", "dp_rank"), ("format=xml", "xml")]
)
def test_loads_refuses_what_it_does_not_know(desk: BusyDesk, query: str, word: str) -> None:
    answer = desk.ask("GET", f"/v1/loads?{query}")
    assert answer.status_code == 400 and word in answer.json()["message"]


def test_an_empty_text_has_no_tokens(desk: BusyDesk) -> None:
    for prompt, tokens in (("", []), (["", "a"], [[], desk.tokenizer.encode("a")])):
        made = desk.post("/tokenize", {"prompt": prompt, "add_special_tokens": False}).json()
        assert made["tokens"] == tokens

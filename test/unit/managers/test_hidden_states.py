"""Hidden states are held as they came, written row by row, and limited. Run alone: pytest THIS_FILE"""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest
from helpers.chat_desk import ChatDesk
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.entrypoints.native_request import checked_sampling
from sglang.srt.entrypoints.native_wishes import wishes
from sglang.srt.managers import text_budget
from sglang.srt.managers.io_struct import FinishReason, RequestWish, TokenReport
from sglang.srt.managers.text_files import CrashDump
from sglang.srt.managers.text_reports import TextReport
from sglang.srt.managers.text_request import Bell, Sample, TextRequest
from sglang.srt.model_executor.step_plan import Logprobs, Vectors
from sglang.srt.sampling.sampling_params import SamplingParams

SIZE = 3


def report_of(wish: str, prompt_len: int, sizes: list[int], kind: str = "f") -> TextReport:
    """``sizes``: vectors of each output; a number of one is its place."""
    report = TextReport(RequestWish(hidden_states=wish), [0] * prompt_len, lambda token: None)
    place = 0
    for size in sizes:
        numbers = array(kind, [at + 0.1 for at in range(place * SIZE, (place + size) * SIZE)])
        parts = (Vectors(numbers.tobytes(), SIZE, kind),) if size else ()
        report.add(TokenReport(Logprobs(), Logprobs(), parts), [])
        place += size
    return report


@given(
    st.sampled_from(["all", "last"]),
    st.integers(1, 5),
    st.lists(st.integers(0, 4), max_size=5),
    st.sampled_from("fd"),
)
def test_as_json_they_are_what_an_engine_gives(
    wish: str, prompt_len: int, sizes: list[int], kind: str
) -> None:
    report, count = report_of(wish, prompt_len, sizes, kind), sum(sizes)
    given = report.meta_info(0, True)
    assert msgspec.json.decode(msgspec.json.encode(report.meta_info(0, True, encoded=True))) == given
    assert report.meta_info(0, False) == {} and ("hidden_states" in given) == bool(count)
    rows = [list(array(kind, [at * SIZE + i + 0.1 for i in range(SIZE)])) for at in range(count)]
    assert report.last_hidden_state == (rows[-1] if rows else None)
    if rows:
        expected = rows[-1] if wish == "last" else [rows[:prompt_len], *rows[prompt_len:]]
        assert given["hidden_states"] == expected


def test_they_are_held_as_they_came() -> None:
    """As Python's numbers they would take eight times as much, before any text of them is made."""
    tracemalloc.start()
    try:
        report = TextReport(RequestWish(hidden_states="all"), [0] * 99, lambda token: None)
        vectors = Vectors(bytes(1 << 20), 1024)
        before = tracemalloc.get_traced_memory()[0]
        report.add(TokenReport(Logprobs(), Logprobs(), (vectors,)), [])
        assert tracemalloc.get_traced_memory()[0] - before < 1 << 16
        tracemalloc.reset_peak()
        before, text = tracemalloc.get_traced_memory()[0], report.meta_info(0, True, encoded=True)
        size = len(msgspec.json.encode(text["hidden_states"]))
        assert tracemalloc.get_traced_memory()[1] - before < 3.5 * size  # 4 bytes each; numbers have 32
    finally:
        tracemalloc.stop()


@pytest.fixture
def desk(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> ChatDesk:
    monkeypatch.setattr(text_budget, "MOST_OF_REQUEST", 200)
    monkeypatch.setattr(text_budget, "MOST_OF_ALL", 300)
    desk = ChatDesk(tmp_path)  # two numbers a vector
    desk.pieces = ["a"]
    return desk


def asked(num_prompt: int, num_new: int, **fields: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": num_new, **fields.pop("sampling", {})}
    return {
        "input_ids": [5] * num_prompt,
        "sampling_params": sampling,
        "return_hidden_states": True,
        **fields,
    }


def test_a_request_may_ask_for_so_much(desk: ChatDesk) -> None:
    assert desk.post("/generate", asked(60, 40)).status_code == 200
    for body in (
        asked(60, 41),
        asked(30, 30, sampling={"n": 2}),
        {**asked(1, 40), "input_ids": [[1] * 20, [2] * 20]},
    ):
        answer = desk.post("/generate", body)
        message = answer.json()["error"]["message"]
        assert answer.status_code == 400 and "200, the limit of a request" in message
        assert "at most 100 tokens" in message
    assert desk.post("/generate", asked(60, 400, return_hidden_states="last")).status_code == 200
    assert desk.post("/generate", asked(60, 400, return_hidden_states=False)).status_code == 200
    assert len(desk.sent) == 3


def test_all_requests_may_hold_so_much(desk: ChatDesk) -> None:
    async def ask() -> None:
        calls = [desk.manager, desk.manager]
        groups = []
        for number, manager in enumerate(calls):
            body = asked(30, 40)
            request = _request(body, f"r{number}")
            groups.append(await manager.submit([request]))
        with pytest.raises(Exception, match="300, the limit of all requests") as caught:
            await desk.manager.submit([_request(asked(10, 1), "r2")])
        assert getattr(caught.value, "status_code", None) == 503
        await groups[0].finished()
        assert desk.manager._hidden.taken == 280  # who has its answer may still be writing it
        del groups[0]
        assert desk.manager._hidden.taken == 140
        await desk.manager.submit([_request(asked(10, 1), "r2")])

    desk.run(ask())
    gc.collect()  # the error that was caught holds on to where it was raised
    assert desk.manager._hidden.taken == 0


def test_who_keeps_what_has_ended_keeps_none_of_them(tmp_path: Path) -> None:
    report, dump = report_of("all", 2, [3]), CrashDump(tmp_path)
    sample = Sample("r", TextRequest("x", SamplingParams()), [1, 2], Bell(), report)
    gone = weakref.ref(report)
    dump.received(sample)
    sample.end(FinishReason("length", length=1), 5.0)
    dump.ended(sample)
    del sample, report
    assert gone() is None and dump.content("x", {})["finished"][0]["prompt"] == "x"


def _request(body: dict[str, Any], rid: str) -> Any:
    (wish,) = wishes(body, 1)
    return TextRequest(body["input_ids"], checked_sampling(body["sampling_params"]), rid, wish=wish)

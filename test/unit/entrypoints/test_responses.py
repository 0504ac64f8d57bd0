"""OpenAI's responses, as its client sees them with known replies. Run alone: pytest THIS_FILE"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import openai
import pytest
from helpers.chat_desk import ChatDesk
from helpers.tool_texts import CUTS, WRITERS, Call, pieces_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang.srt.entrypoints.responses.store import ResponseStore
from sglang.srt.entrypoints.responses.talk import talk_messages
from sglang.srt.managers.io_struct import FinishReason

T = TypeVar("T")
CALLS: list[Call] = [("get-weather", {"town": "東京", "days": 3}), ("list", {})]
TOOLS: Any = [
    {"type": "function", "name": name, "description": "x", "parameters": {"type": "object"}, "strict": True}
    for name, _ in CALLS
]
TEXT = f"I look.</think>Well. {WRITERS['kimi_k2'](CALLS)}"
KINDS = ["reasoning", "message", "function_call", "function_call"]
KEY = "a-key"
ASKED: Any = {"model": "m", "input": "Hello"}


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> ChatDesk:
    folder = tmp_path_factory.mktemp("kimi")
    return ChatDesk(folder, tool_call_parser="kimi_k2", reasoning_parser="kimi_k2", api_key=KEY)


def run(desk: ChatDesk, pieces: list[str], work: Callable[[Any], Awaitable[T]], key: str = KEY) -> T:
    """``work`` has the client's ``responses``; what it asks for is answered by ``pieces``."""

    async def with_client() -> T:
        url, client = "http://desk/v1", desk.client()
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, http_client=client) as api:
            return await work(api.responses)

    desk.pieces, desk.held_at = pieces, None
    desk.finish = FinishReason("stop", matched=7)
    return desk.run(with_client())


def create(desk: ChatDesk, pieces: list[str], **body: Any) -> Any:
    return run(desk, pieces, lambda api: api.create(**ASKED | body))


async def until(api: Any, response_id: str, status: str) -> Any:
    async with asyncio.timeout(5):
        while (found := await api.retrieve(response_id)).status != status:
            await asyncio.sleep(0.002)
    return found


def told(output: Any) -> list[Any]:
    """Without ids, which are made up."""
    items = [item.model_dump(exclude={"id", "caller", "async_"}, exclude_none=True) for item in output]
    return [json.loads(json.dumps(item)) for item in items]


def test_whole(desk: ChatDesk) -> None:
    response = create(desk, [TEXT], tools=TOOLS, instructions="Be kind", metadata={"a": "b"})
    assert [item.type for item in response.output] == KINDS
    thought, said, *calls = response.output
    assert thought.content[0].text == "I look." and response.output_text == "Well." == said.content[0].text
    assert [(call.name, json.loads(call.arguments)) for call in calls] == CALLS
    assert [call.call_id for call in calls] == ["functions.get-weather:0", "functions.list:1"]
    assert {item.status for item in response.output} == {response.status} == {"completed"}
    assert response.usage.output_tokens_details.reasoning_tokens == len(
        desk.tokenizer.encode("I look.</think>")
    )
    assert response.metadata == {"a": "b"} and response.id == desk.sent[-1].rid
    assert "Be kind" in desk.prompt() and "namespace functions {" in desk.prompt()


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=CUTS)
def test_streamed_in_any_pieces(desk: ChatDesk, cuts: list[int]) -> None:
    async def stream(api: Any) -> list[Any]:
        return [event async for event in await api.create(**ASKED, tools=TOOLS, stream=True)]

    events = run(desk, pieces_of(TEXT, cuts), stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    final = events[-1]
    assert final.type == "response.completed"
    assert told(final.response.output) == told(create(desk, [TEXT], tools=TOOLS).output)
    check_items(events, final.response.output)


def check_items(events: list[Any], output: list[Any]) -> None:
    """Of each item: its begin, its parts' deltas that add up, its end; one after the other."""
    for index, item in enumerate(output):
        own = [event for event in events if getattr(event, "output_index", None) == index]
        assert own[0].type == "response.output_item.added" and own[-1].type == "response.output_item.done"
        assert own[-1].item == item and own[0].item.id == item.id
        assert {getattr(event, "item_id", item.id) for event in own} == {item.id}
        text = "".join(event.delta for event in own if event.type.endswith(".delta"))
        assert text == (item.arguments if item.type == "function_call" else item.content[0].text)
        kinds = [event.type.removeprefix("response.") for event in own if not event.type.endswith(".delta")]
        names = {"function_call": "function_call_arguments", "reasoning": "reasoning_text"}
        done = f"{names.get(item.type, 'output_text')}.done"
        inner = [done] if item.type == "function_call" else ["content_part.added", done, "content_part.done"]
        assert kinds == ["output_item.added", *inner, "output_item.done"]
    indices = [event.output_index for event in events if hasattr(event, "output_index")]
    assert indices == sorted(indices)


def test_the_client_puts_a_stream_together(desk: ChatDesk) -> None:
    async def stream(api: Any) -> Any:
        async with api.stream(**ASKED, tools=TOOLS) as events:
            async for _ in events:
                pass
            return await events.get_final_response()

    assert [item.type for item in run(desk, pieces_of(TEXT, [3, 9, 40]), stream).output] == KINDS


def test_a_talk_goes_on_from_a_response(desk: ChatDesk) -> None:
    """By its id or by its items: the model reads the same."""

    async def talk(api: Any) -> list[str]:
        first = await api.create(**ASKED, tools=TOOLS)
        results = [
            {"type": "function_call_output", "call_id": item.call_id, "output": f"result {number}"}
            for number, item in enumerate(first.output[2:])
        ]
        prompts = []
        for body in (
            {"previous_response_id": first.id, "input": results},
            {"input": [{"role": "user", "content": "Hello"}, *first.output, *results]},
        ):
            await api.create(model="m", tools=TOOLS, **body)
            prompts.append(desk.prompt())
        return prompts

    by_id, by_items = run(desk, [TEXT], talk)
    assert by_id == by_items
    words = ("Hello", "<think>I look.</think>Well.", "functions.get-weather:0", "result 0", "result 1")
    places = [by_id.index(word) for word in words]
    assert places == sorted(places)


def test_what_belongs_to_a_turn_is_one_message() -> None:
    part = {"type": "output_text", "text": "said"}
    calls = [
        {"type": "function_call", "call_id": name, "name": "f", "arguments": f'{{"a": "{name}"}}'}
        for name in ("c1", "c2")
    ]
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    said = {"type": "message", "role": "assistant", "content": [part, part]}
    result = {
        "type": "function_call_output",
        "call_id": "c1",
        "output": [{"type": "input_text", "text": "r"}],
    }
    functions = [{"name": "f", "arguments": call["arguments"]} for call in calls]
    called = [
        {"id": call["call_id"], "type": "function", "function": function}
        for call, function in zip(calls, functions, strict=True)
    ]
    whole = {"role": "assistant", "reasoning_content": "hm", "content": "saidsaid", "tool_calls": called}
    answered = {"role": "tool", "tool_call_id": "c1", "content": "r"}
    assert talk_messages([thought, said, *calls, result]) == [whole, answered]
    again = [{"role": "assistant", "content": "", "reasoning_content": "hm"}]
    assert talk_messages([thought, thought]) == again * 2
    assert talk_messages([said, said]) == [{"role": "assistant", "content": "saidsaid"}] * 2
    assert talk_messages([calls[0], result, calls[1]]) == [
        {"role": "assistant", "content": "", "tool_calls": called[:1]},
        answered,
        {"role": "assistant", "content": "", "tool_calls": called[1:]},
    ]


class FakeRun:
    def __init__(self, name: str, size: int, has_ended: bool) -> None:
        self.asked = SimpleNamespace(id=name)
        self.size, self.has_ended = size, has_ended

    def num_bytes(self) -> int:
        return self.size


USES = st.lists(st.tuples(st.sampled_from("pgr"), st.integers(0, 7), st.integers(1, 40), st.booleans()))


@settings(max_examples=40, deadline=None)
@given(USES)
def test_the_store_is_bounded_and_forgets_what_was_used_longest_ago(uses: list[Any]) -> None:
    store, kept = ResponseStore(most_responses=4, most_bytes=60), {}
    for what, number, size, has_ended in uses:
        name = str(number)
        if what == "p":
            kept.pop(name, None)
            run: Any = FakeRun(name, size, has_ended)
            store.put(run)
            kept[name] = run
            for other in [one for one in kept if kept[one].has_ended]:
                if len(kept) > 4 or sum(one.size for one in kept.values()) > 60:
                    del kept[other]
        elif what == "g":
            assert store.get(name) is kept.get(name)
            if name in kept:
                kept[name] = kept.pop(name)
        else:
            assert store.remove(name) is kept.pop(name, None)
    assert all(store.get(name) is run for name, run in kept.items())
    ended = sum(run.size for run in kept.values() if run.has_ended)
    assert ended <= 60 and sum(run.has_ended for run in kept.values()) <= 4


def test_what_is_stored(desk: ChatDesk) -> None:
    async def ask(api: Any) -> None:
        kept = await api.create(**ASKED)
        assert await api.retrieve(kept.id) == kept
        dropped = await api.create(**ASKED, store=False)
        await api.delete(kept.id)
        for missing in (kept.id, dropped.id, "resp_none"):
            with pytest.raises(openai.NotFoundError) as caught:
                await api.retrieve(missing)
            assert missing in caught.value.message and caught.value.code == "not_found"
            with pytest.raises(openai.NotFoundError):
                await api.create(**ASKED, previous_response_id=missing)
        with pytest.raises(openai.BadRequestError, match="background"):
            await api.cancel((await api.create(**ASKED)).id)

    run(desk, ["a"], ask)


def test_several_processes_keep_none(tmp_path: Path) -> None:
    """Each would know its own alone."""
    desk = ChatDesk(tmp_path, api_key=KEY, tokenizer_worker_num=2)

    async def ask(api: Any) -> None:
        response = await api.create(**ASKED)
        assert response.output_text == "a" and response.store is False
        with pytest.raises(openai.NotFoundError, match="tokenizer-worker-num"):
            await api.retrieve(response.id)
        with pytest.raises(openai.NotFoundError, match="tokenizer-worker-num"):
            await api.create(**ASKED, previous_response_id=response.id)
        with pytest.raises(openai.BadRequestError, match="tokenizer-worker-num"):
            await api.create(**ASKED, background=True)

    run(desk, ["a"], ask)


def test_what_it_had_read(desk: ChatDesk) -> None:
    said: Any = [
        {"role": "user", "content": "Hello", "id": "mine"},
        {"role": "assistant", "content": "Yes?"},
        {"type": "function_call", "call_id": "c", "name": "list", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "r"},
    ]

    async def ask(api: Any) -> None:
        first = await api.create(model="m", input=said)
        second = await api.create(**ASKED, previous_response_id=first.id)
        items = [item async for item in await api.input_items.list(second.id, order="asc", limit=2)]
        assert len({item.id for item in items}) == len(items) == 4 + len(first.output) + 1
        assert [item.type for item in items[:4]] == [item.get("type", "message") for item in said]
        assert items[0].id == "mine" and items[0].content[0].text == "Hello"
        assert (items[1].content[0].type, items[1].content[0].text) == ("output_text", "Yes?")
        assert [item.id for item in items[4:-1]] == [item.id for item in first.output]
        newest = [item async for item in await api.input_items.list(second.id)]
        assert newest == items[::-1]
        page = await api.input_items.list(second.id, after=items[-1].id, limit=3)
        assert page.data == newest[1:4] and page.has_more
        assert [item.id async for item in await api.input_items.list(first.id, order="asc")] == [
            item.id for item in items[:4]
        ]
        with pytest.raises(openai.BadRequestError, match="after"):
            await api.input_items.list(first.id, after=items[-1].id)
        for wrong in ({"limit": 0}, {"limit": 101}, {"order": "up"}):
            with pytest.raises(openai.BadRequestError):
                await api.input_items.list(first.id, **wrong)
        with pytest.raises(openai.NotFoundError):
            await api.input_items.list("resp_x")

    run(desk, ["</think>one"], ask)


def test_in_the_background(desk: ChatDesk) -> None:
    async def ask(api: Any) -> None:
        desk.held_at = 2
        begun = await api.create(**ASKED, background=True)
        assert (begun.status, begun.output) == ("queued", [])
        while (seen := await until(api, begun.id, "in_progress")).output_text != "onetwo":
            await asyncio.sleep(0.002)
        with pytest.raises(openai.BadRequestError, match="in_progress"):
            await api.create(**ASKED, previous_response_id=begun.id)
        assert seen.output[0].status == "in_progress"
        desk.held_at = None
        ended = await until(api, begun.id, "completed")
        assert ended.output_text == "onetwothree" and (await api.cancel(begun.id)) == ended

    run(desk, ["</think>one", "two", "three"], ask)


def test_cancelled(desk: ChatDesk) -> None:
    async def ask(api: Any) -> None:
        desk.held_at = 1
        begun = await api.create(**ASKED, background=True)
        await until(api, begun.id, "in_progress")
        cancelled = await api.cancel(begun.id)
        assert (cancelled.status, cancelled.output_text) == ("cancelled", "one")
        assert cancelled.output[0].status == "incomplete"
        with pytest.raises(openai.BadRequestError, match="cancelled"):
            await api.create(**ASKED, previous_response_id=begun.id)
        another = await api.create(**ASKED, background=True)
        await api.delete(another.id)  # while it runs

    run(desk, ["</think>one", "two"], ask)


def test_a_stream_in_the_background_is_listened_to_again(desk: ChatDesk) -> None:
    async def numbers(events: AsyncIterator[Any]) -> list[int]:
        return [event.sequence_number async for event in events]

    async def ask(api: Any) -> None:
        events = [event async for event in await api.create(**ASKED, background=True, stream=True)]
        kinds = [event.type.removeprefix("response.") for event in events]
        assert kinds[:3] == ["created", "queued", "in_progress"] and kinds[-1] == "completed"
        again = await api.retrieve(events[0].response.id, stream=True, starting_after=4)
        assert await numbers(again) == list(range(5, len(events)))
        plain = await api.create(**ASKED)
        with pytest.raises(openai.BadRequestError, match="background and stream"):
            await api.retrieve(plain.id, stream=True)

    run(desk, ["</think>one", "two", "three"], ask)


@pytest.mark.parametrize(
    "finish, status, kind",
    [
        (FinishReason("length", length=3), "incomplete", "incomplete"),
        (FinishReason("abort", message="gone"), "cancelled", "incomplete"),
        (FinishReason("abort", message="broken", status_code=500), "failed", "failed"),
    ],
)
def test_other_endings(desk: ChatDesk, finish: FinishReason, status: str, kind: str) -> None:
    async def ask(api: Any) -> list[Any]:
        desk.finish = finish
        return [event async for event in await api.create(**ASKED, stream=True)]

    last = run(desk, ["</think>one", "two"], ask)[-1]
    assert (last.type, last.response.status) == (f"response.{kind}", status)
    assert last.response.output_text == "onetwo" and last.response.usage.output_tokens > 0
    if status == "incomplete":
        assert last.response.incomplete_details.reason == "max_output_tokens"
    if status == "failed":
        assert (last.response.error.code, last.response.error.message) == ("server_error", "broken")


def test_a_failure_before_anything_came_is_an_error(desk: ChatDesk) -> None:
    async def ask(api: Any) -> None:
        desk.finish = FinishReason("abort", message="no such grammar", status_code=400)
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="no such grammar"):
                await api.create(**ASKED, stream=stream)
        failed = await api.create(**ASKED, background=True)
        error = (await until(api, failed.id, "failed")).error
        assert (error.code, error.message) == ("invalid_prompt", "no such grammar")

    run(desk, [""], ask)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def test_what_the_model_is_asked(desk: ChatDesk) -> None:
    form = {"type": "json_schema", "name": "x", "schema": SCHEMA}
    create(desk, ["a"], text={"format": form}, max_output_tokens=7, temperature=0.5, top_p=0.25)
    params = desk.sent[-1].sampling
    assert json.loads(params.json_schema or "") == SCHEMA
    assert (params.max_new_tokens, params.temperature, params.top_p) == (7, 0.5, 0.25)
    response = create(desk, ["a"], extra_body={"top_k": 3, "stop": ["x"]})
    params = desk.sent[-1].sampling
    assert params.top_k == 3 and (response.temperature, response.text.format.type) == (1.0, "text")
    create(desk, ["[]"], tools=TOOLS, tool_choice={"type": "function", "name": "list"})
    assert "get-weather" not in (desk.sent[-1].sampling.json_schema or "")
    allowed: Any = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "list"}],
    }
    create(desk, ["[]"], tools=TOOLS, tool_choice=allowed)
    assert "get-weather" not in desk.prompt() and "list" in (desk.sent[-1].sampling.json_schema or "")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "web_search"}]}, "tools[0] is of type 'web_search'"),
    ({"tools": TOOLS, "tool_choice": {"type": "file_search"}}, "file_search"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "tools": [{}]}}, "tools with names"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": {}, "call_id": "x"}]}, "arguments"),
    ({"input": [{"role": "user", "content": 3}]}, "input[0].content"),
    ({"input": []}, "empty"),
    ({"input": 3}, "input"),
    ({"conversation": "c"}, "conversation"),
    ({"truncation": "auto"}, "truncation"),
    ({"top_logprobs": 3000}, "top_logprobs"),
    ({"include": ["file_search_call.results"]}, "file_search_call.results"),
    ({"background": True, "store": False}, "background needs store"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ({"reasoning": {"effort": "endless"}}, "reasoning_effort"),
    ({"metadata": "a"}, "metadata"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"metadata": {str(n): "x" for n in range(17)}}, "at most 16"),
    ({"metadata": {"a": "x" * 513}}, "512"),
    ({"user": 3}, "user"),
    ({"prompt_cache_key": ["a"]}, "prompt_cache_key"),
    ({"max_output_tokens": 10**6}, "4096"),
    ({"max_output_tokens": -1}, "max_output_tokens must"),
    ({"max_output_tokens": "many"}, "max_output_tokens"),
]


@pytest.mark.parametrize("body, words", REFUSED, ids=[words for _, words in REFUSED])
def test_what_is_refused(desk: ChatDesk, body: dict[str, Any], words: str) -> None:
    sent = len(desk.sent)
    with pytest.raises(openai.BadRequestError) as caught:
        create(desk, ["a"], **{"extra_body": body} | {k: v for k, v in body.items() if k == "input"})
    assert words in caught.value.message and caught.value.type == "invalid_request_error"
    assert len(desk.sent) == sent


def test_refusals_that_reach_no_endpoint(desk: ChatDesk, tmp_path: Path) -> None:
    with pytest.raises(openai.AuthenticationError) as caught:
        run(desk, ["a"], lambda api: api.create(**ASKED), key="another")
    assert caught.value.code == "invalid_api_key"
    plain = ChatDesk(tmp_path, max_request_body_mb=1)
    for method, path, body, status in (
        ("PUT", "/v1/responses", {}, 405),
        ("POST", "/v1/responses", {"input": "x" * 1_100_000}, 413),
        ("POST", "/v1/responses/x/nothing", {}, 404),
        ("GET", "/v1/responses/x?stream=perhaps", None, 400),
    ):
        answer = plain.ask(method, path, body)
        assert answer.status_code == status and answer.json()["error"]["message"], path

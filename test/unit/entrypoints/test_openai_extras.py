"""What OpenAI's endpoints tell beside their own fields. Run alone: pytest THIS_FILE"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from helpers.chat_desk import URL, ChatDesk

from sglang.srt.entrypoints.openai.extras import Extras
from sglang.srt.managers.io_struct import RequestStats
from sglang.srt.server_args import ServerArgs

USER = [{"role": "user", "content": "Hello"}]
PIECES = ["One ", "two ", "three"]
GIVEN = ServerArgs.from_command_line(["--enable-cache-report", "--stream-response-default-include-usage"])
FLAGS = {
    name: getattr(GIVEN, name) for name in ("enable_cache_report", "stream_response_default_include_usage")
}
SPEC = RequestStats(
    5, 6, 3, spec_tokens=6, spec_verify_ct=2, spec_num_correct_drafts=4, spec_num_proposed_drafts=6,
    spec_correct_drafts_histogram=[0, 0, 2],
)  # fmt: skip


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> ChatDesk:
    made = ChatDesk(tmp_path_factory.mktemp("plain"))
    made.pieces, made.cached_tokens = PIECES, 3
    return made


@pytest.fixture(scope="module")
def telling(tmp_path_factory: pytest.TempPathFactory) -> ChatDesk:
    made = ChatDesk(tmp_path_factory.mktemp("telling"), **FLAGS)
    made.pieces, made.cached_tokens = PIECES, 3
    return made


def events(response: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line]
    assert response.status_code == 200 and lines.pop() == "[DONE]", response.text
    return [json.loads(line) for line in lines]


def test_cached_tokens_are_told_with_the_flag(desk: ChatDesk, telling: ChatDesk) -> None:
    for path, body in ((URL, {"messages": USER, "n": 2}), ("/v1/completions", {"prompt": ["ab", "cd"]})):
        assert desk.post(path, body).json()["usage"]["prompt_tokens_details"] is None
        details = telling.post(path, body).json()["usage"]["prompt_tokens_details"]
        assert details == {"cached_tokens": 3 if path == URL else 6}  # a prompt counts once


@pytest.mark.parametrize("options", [None, {"include_usage": False}, {"include_usage": True}])
def test_usage_ends_a_stream_where_it_is_asked_for(
    desk: ChatDesk, telling: ChatDesk, options: dict[str, bool] | None
) -> None:
    for path, body in ((URL, {"messages": USER}), ("/v1/completions", {"prompt": "ab"})):
        streamed = body | {"stream": True} | ({} if options is None else {"stream_options": options})
        told = [event["usage"] for event in events(desk.post(path, streamed))]
        assert bool(told[-1]) == bool(options and options["include_usage"]) and not any(told[:-1])
        last = events(telling.post(path, streamed))[-1]
        assert last["choices"] == [] and last["usage"] == telling.post(path, body).json()["usage"]


def test_sglext_is_told_on_request(desk: ChatDesk) -> None:
    wish = {"return_cached_tokens_details": True, "return_spec_tokens_details": True}
    for path, body in ((URL, {"messages": USER}), ("/v1/completions", {"prompt": "ab"})):
        assert "sglext" not in desk.post(path, body).json()
        told = desk.post(path, body | wish).json()["sglext"]
        assert told == {"cached_tokens_details": {"device": 3, "host": 0}}  # nothing was speculated
        streamed = events(desk.post(path, body | wish | {"stream": True}))
        assert [event["sglext"] for event in streamed if "sglext" in event] == [told]
        assert streamed[-1]["choices"] == []


def test_speculation_of_each_sample_is_told() -> None:
    class Ended:
        def __init__(self, stats: RequestStats) -> None:
            self.stats = stats

    def told(*stats: RequestStats) -> Any:
        samples: Any = [Ended(one) for one in stats]
        extras = Extras(cache_report=False, always_usage=False, cached_tokens=False, spec_tokens=True)
        return (extras.sglext(samples) or {}).get("spec_tokens_details")

    details = told(SPEC)
    assert details["spec_accept_rate"] == pytest.approx(4 / 6)
    assert (details["spec_accept_length"], details["spec_verify_ct"]) == (3.0, 2)
    assert details["spec_correct_drafts_histogram"] == [0, 0, 2]
    assert told(SPEC, RequestStats(5, 6, 0)) == [details, {}]
    assert told(RequestStats(5, 6, 0)) is None


def test_ids_and_meta_info_of_a_chat(desk: ChatDesk) -> None:
    plain = desk.post(URL, {"messages": USER}).json()["choices"][0]
    asked = {"return_token_ids": True, "return_meta_info": True, "rid": "mine"}
    choice = desk.post(URL, {"messages": USER, **asked}).json()["choices"][0]
    told = {name: choice.pop(name) for name in ("prompt_token_ids", "response_token_ids", "meta_info")}
    assert choice == plain
    assert told["prompt_token_ids"] == desk.sent[-1].input_ids
    assert desk.tokenizer.decode(told["response_token_ids"]) == "".join(PIECES)
    assert (told["meta_info"]["id"], told["meta_info"]["cached_tokens"]) == ("mine", 3)
    only = desk.post(URL, {"messages": USER, "return_prompt_token_ids": True}).json()["choices"][0]
    assert only == plain | {"prompt_token_ids": told["prompt_token_ids"]}
    for name in ("return_prompt_token_ids", "return_token_ids", "return_meta_info"):
        assert name in desk.refused(stream=True, **{name: True})


def test_ids_of_a_completion(desk: ChatDesk) -> None:
    body = {"prompt": ["ab", "cd"], "return_token_ids": True, "echo": True}
    whole = desk.post("/v1/completions", body).json()["choices"]
    prompts = [desk.tokenizer.encode(text) for text in ("ab", "cd")]
    assert [choice["prompt_token_ids"] for choice in whole] == prompts
    assert all(desk.tokenizer.decode(choice["token_ids"]) == "".join(PIECES) for choice in whole)
    streamed = events(desk.post("/v1/completions", body | {"stream": True}))
    for index, choice in enumerate(whole):
        own = [c for event in streamed for c in event["choices"] if c["index"] == index]
        assert "".join(c["text"] for c in own) == choice["text"]
        assert desk.tokenizer.decode([i for c in own for i in c["token_ids"]]) == "".join(PIECES)
        assert ["prompt_token_ids" in c for c in own] == [True] + [False] * (len(own) - 1)


@pytest.mark.parametrize(
    "path, fields",
    [
        ("/v1/chat/completions", ["stream", "model", "parallel_tool_calls", "separate_reasoning"]),
        ("/v1/chat/completions", ["continue_final_message"]),
        ("/v1/completions", ["stream", "model", "echo"]),
        ("/v1/responses", ["stream", "model"]),
        ("/v1/messages", ["stream", "model"]),
    ],
)  # fmt: skip
def test_null_is_a_field_that_is_not_there(desk: ChatDesk, path: str, fields: list[str]) -> None:
    """As OpenAI's clients send what they were not given."""
    prompts = {"/v1/completions": {"prompt": "Hello"}, "/v1/responses": {"input": "Hello"}}
    body = prompts.get(path, {"messages": USER}) | {"max_tokens": 5}
    if path == "/v1/responses":
        body = {"input": "Hello", "max_output_tokens": 16}
    answer = desk.post(path, body | dict.fromkeys(fields))
    assert answer.status_code == 200, answer.text
    required = {"/v1/completions": "prompt", "/v1/responses": "input"}.get(path, "messages")
    assert desk.post(path, body | {required: None}).status_code == 400


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_client_that_goes_in_the_middle_of_its_body_is_no_fault(desk: ChatDesk, path: str) -> None:
    received = iter(
        [{"type": "http.request", "body": b'{"te', "more_body": True}, {"type": "http.disconnect"}]
    )
    sent = []

    async def go() -> None:
        async def receive() -> Any:
            return next(received)

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"content-type", b"application/json"), (b"content-length", b"1000")]
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
            "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
            "headers": headers, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
        }  # fmt: skip
        await desk.app(scope, receive, send)

    desk.run(go())
    assert [message.get("status") for message in sent if message["type"] == "http.response.start"] == [499]

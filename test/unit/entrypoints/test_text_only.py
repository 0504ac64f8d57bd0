"""What is no text is refused the same way everywhere; the tokens of a chat. Run alone: pytest THIS_FILE"""

from __future__ import annotations

from typing import Any

import pytest
from helpers.chat_desk import ChatDesk

from sglang.srt.entrypoints.text_only import TEXT_ONLY


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> ChatDesk:
    desk = ChatDesk(tmp_path_factory.mktemp("desk"), tool_call_parser="kimi_k2")
    desk.pieces = ["a"]
    return desk


def said(*content: Any, role: str = "user") -> list[Any]:
    return [{"role": role, "content": [*content]}]


TEXT = {"type": "text", "text": "What is this?"}
IMAGE_URL = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
INPUT_IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": [BLOCK]}
CALLED = {"type": "function_call_output", "call_id": "c", "output": [INPUT_IMAGE]}
SENT: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"text": "a", "image_data": "x.png"}),
    ("/generate", {"text": ["a", "b"], "image_data": [["x.png"], None]}),
    ("/generate", {"input_ids": [1], "video_data": "x.mp4"}),
    ("/generate", {"text": "a", "audio_data": ["x.wav"]}),
    ("/v1/chat/completions", {"messages": said(TEXT, IMAGE_URL)}),
    ("/v1/chat/completions", {"messages": said({"type": "input_audio", "input_audio": {}})}),
    ("/v1/tokenize", {"messages": said(TEXT, IMAGE_URL)}),
    ("/v1/responses", {"input": said(INPUT_IMAGE)}),
    ("/v1/responses", {"input": said({"type": "input_file", "file_id": "f"})}),
    ("/v1/responses", {"input": [CALLED]}),
    ("/v1/messages", {"max_tokens": 5, "messages": said(TEXT, BLOCK)}),
    ("/v1/messages", {"max_tokens": 5, "messages": said(RESULT)}),
    ("/v1/messages/count_tokens", {"messages": said({"type": "document", "source": {}})}),
]


@pytest.mark.parametrize("path, body", SENT)
def test_what_is_no_text_is_refused(desk: ChatDesk, path: str, body: dict[str, Any]) -> None:
    answer = desk.post(path, body)
    assert answer.status_code == 400 and TEXT_ONLY in answer.text
    assert not desk.sent


def test_a_chat_has_the_tokens_that_its_request_has(desk: ChatDesk) -> None:
    tools = [{"type": "function", "function": {"name": "list", "parameters": {"type": "object"}}}]
    for body in (
        {"messages": said(TEXT)},
        {"messages": said(TEXT), "tools": tools},
        {"messages": said(TEXT), "chat_template_kwargs": {"thinking": False}},
        {
            "messages": [*said(TEXT), {"role": "assistant", "content": "It is"}],
            "continue_final_message": True,
        },
    ):
        assert desk.post("/v1/chat/completions", body).status_code == 200
        sent = desk.sent.pop()
        for path in ("/tokenize", "/v1/tokenize"):
            made = desk.post(path, body).json()
            assert made == {"tokens": sent.input_ids, "count": len(sent.input_ids), "max_model_len": 4096}


def test_a_chat_without_the_beginning_of_a_reply(desk: ChatDesk) -> None:
    messages = said(TEXT)
    whole = desk.post("/tokenize", {"messages": messages}).json()["tokens"]
    alone = desk.post("/tokenize", {"messages": messages, "add_generation_prompt": False}).json()["tokens"]
    assert whole[: len(alone)] == alone and len(alone) < len(whole)


@pytest.mark.parametrize(
    "body, words",
    [
        ({"messages": said(TEXT), "prompt": "a"}, "either prompt or messages"),
        (
            {"messages": said(TEXT), "add_generation_prompt": True, "continue_final_message": True},
            "can't both be true",
        ),
        ({"messages": said(TEXT), "continue_final_message": True}, "whose role is assistant"),
        ({"messages": []}, "must not be empty"),
        ({"messages": "a"}, "messages"),
        ({"messages": said(TEXT), "add_special_tokens": []}, "add_special_tokens"),
        ({"messages": [{"role": "x", "content": "a"}]}, "role"),
        ({"messages": said({"type": "text", "text": 3})}, "not a string"),
    ],
)
def test_what_is_refused(desk: ChatDesk, body: dict[str, Any], words: str) -> None:
    answer = desk.post("/v1/tokenize", body)
    assert answer.status_code == 400 and words in answer.json()["message"]

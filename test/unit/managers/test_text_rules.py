"""Bad words and thinking budgets from a request's fields to tokens. Run alone: pytest THIS_FILE"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.chat_desk import ChatDesk
from helpers.tiny_tokenizer import write_byte_tokenizer, write_merged_tokenizer

from sglang.srt.entrypoints.native_request import parse_call
from sglang.srt.managers.text_request import RequestError, TextRequest
from sglang.srt.managers.text_rules import choice_rules
from sglang.srt.sampling.sampling_params import ReasoningEnd, SamplingParams, SamplingParamsError
from sglang.srt.utils.text_tokenizer import TextTokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> TextTokenizer:
    return TextTokenizer.from_folder(write_byte_tokenizer(tmp_path))


def thinking(tokenizer: TextTokenizer, parser: str | None, text: str = "hi", **body: Any) -> Any:
    call = parse_call({"text": text, "sampling_params": {"thinking_budget": 5}, **body}, parser, tokenizer)
    return call.requests[0].thinking


def test_words_are_banned_with_and_without_a_blank_before(tmp_path: Path) -> None:
    tokenizer = TextTokenizer.from_folder(write_merged_tokenizer(tmp_path))
    params = SamplingParams(bad_words=("word", "  word", "the"))
    rules = choice_rules(TextRequest("x", params), tokenizer, tokenizer.vocab_size)
    assert rules is not None and rules.thinking is None
    texts = [tokenizer.decode(list(word)) for word in rules.bad_words]
    assert sorted(texts) == [" the", " word", "the", "word"]
    assert rules.need_masks == any(len(word) > 1 for word in rules.bad_words)


def test_words_that_have_no_tokens_or_too_many(tokenizer: TextTokenizer) -> None:
    with pytest.raises(RequestError, match="' ' has no tokens"):
        choice_rules(TextRequest("x", SamplingParams(bad_words=(" ",))), tokenizer, 256)
    with pytest.raises(RequestError, match="has no tokens"):
        choice_rules(TextRequest("x", SamplingParams(bad_words=("z",))), tokenizer, 100)
    many = SamplingParams(bad_words=("z",), logit_bias=tuple((i, 1.0) for i in range(1024)))
    with pytest.raises(RequestError, match="at most 1024 tokens together"):
        choice_rules(TextRequest("x", many), tokenizer, 256)
    with pytest.raises(SamplingParamsError, match="at most 256 bad_words, got 300"):
        SamplingParams.from_dict({"bad_words": [str(i) for i in range(300)]})


def test_the_part_that_a_budget_is_about(tokenizer: TextTokenizer) -> None:
    open_end = ReasoningEnd("</think>")
    assert thinking(tokenizer, "deepseek-r1") == open_end
    assert thinking(tokenizer, "qwen3", "say <think>\n") == open_end
    assert thinking(tokenizer, None, require_reasoning=True) == open_end
    assert thinking(tokenizer, "deepseek-r1", "<think></think>") is None
    assert thinking(tokenizer, "qwen3") is None  # of this tokenizer the mark is no token
    asked = TextRequest("x", SamplingParams(thinking_budget=7), thinking=open_end)
    rules = choice_rules(asked, tokenizer, 256)
    assert rules is not None and rules.thinking is not None and rules.need_masks
    assert (rules.thinking.budget, bytes(rules.thinking.end_ids)) == (7, b"</think>")
    assert choice_rules(TextRequest("x", SamplingParams(thinking_budget=7)), tokenizer, 256) is None


def test_a_budget_where_the_reasoning_is_unknown_is_refused(tokenizer: TextTokenizer) -> None:
    with pytest.raises(RequestError, match="needs a server with --reasoning-parser"):
        thinking(tokenizer, None)
    with pytest.raises(RequestError, match="not supported with --reasoning-parser gpt-oss"):
        thinking(tokenizer, "gpt-oss")


@pytest.mark.parametrize(
    ("given", "budget"),
    [
        ({"thinking_budget": 3}, 3),
        ({"thinking_token_budget": 3}, 3),
        ({"custom_params": {"thinking_budget": 3}}, 3),
        ({"thinking_budget": 2, "thinking_token_budget": 3}, 2),
        ({"thinking_budget": -1}, None),
        ({}, None),
    ],
)
def test_names_of_the_budget(given: dict[str, Any], budget: int | None) -> None:
    assert SamplingParams.from_dict(given).thinking_budget == budget


@pytest.mark.parametrize("given", [{"thinking_budget": -2}, {"thinking_budget": "5"}, {"custom_params": [1]}])
def test_what_is_no_budget_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(SamplingParamsError, match="thinking_budget|custom_params"):
        SamplingParams.from_dict(given)


def test_fields_of_a_chat_reach_the_scheduler(tmp_path: Path) -> None:
    desk = ChatDesk(tmp_path, reasoning_parser="kimi_k2", tool_call_parser="kimi_k2")
    fields = {"thinking_budget": 5, "bad_words": ["ab"], "stop_regex": "a+", "priority": 3, "cache_salt": "u"}
    desk.chat(["It is.</think>Yes."], **fields)
    sent = desk.sent[-1]
    assert sent.rules is not None and sent.rules.thinking is not None
    assert sent.rules.thinking.budget == 5 and sent.rules.thinking.end == sent.reasoning_end
    assert desk.tokenizer.decode(list(sent.rules.thinking.end_ids), False) == "</think>"
    assert {desk.tokenizer.decode(list(word)) for word in sent.rules.bad_words} == {"ab", " ab"}
    assert (sent.sampling.stop_regex, sent.priority, bool(sent.cache_salt)) == (("a+",), 3, True)
    ended = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "It is.</think>Ye"}]
    desk.chat(["s."], messages=ended, continue_final_message=True, thinking_budget=5)
    assert desk.sent[-1].rules is None
    assert "priority" in desk.refused(priority="high")


def test_a_budget_without_a_parser_is_refused_in_chats(tmp_path: Path) -> None:
    assert "--reasoning-parser" in ChatDesk(tmp_path).refused(thinking_budget=5)

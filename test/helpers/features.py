"""Everything a request may ask for, as bodies for the whole server, and how answers show that it was heard.

A body is made from the answer without the feature (the bare one), so that there is something to do for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from helpers.processors import Fickle
from helpers.whole_server import END_ID, Answer

PROMPT = "The quick brown fox jumps over the lazy dog, étude"
NUM_NEW = 12
GREEDY: dict[str, Any] = {"temperature": 0.0, "sampling_seed": 5}
SAMPLED: dict[str, Any] = {"temperature": 1.3, "sampling_seed": 5}
CHOICES = {"greedy": GREEDY, "sampled": SAMPLED}

Body = dict[str, Any]
Check = Callable[[Answer, Answer], bool]  # of an answer and the bare one


@dataclass(frozen=True, slots=True)
class Feature:
    name: str
    make: Callable[[Answer], Body]  # beside PROMPT and its sampling; keys of sampling_params as they are
    check: Check
    path: str = "/generate"
    choices: tuple[str, ...] = ("greedy", "sampled")  # of which the check holds; outputs are equal for both

    def body(self, bare: Answer, choice: str, stream: bool) -> Body:
        made = self.make(bare)
        if self.path == "/generate":
            rules = {"max_new_tokens": NUM_NEW, "ignore_eos": True} | CHOICES[choice]
            rules |= made.pop("sampling_params", {})
            prompt = {} if "input_ids" in made else {"text": PROMPT}
            return {**prompt, "sampling_params": rules, "stream": stream, **made}
        heat = {"temperature": CHOICES[choice]["temperature"], "seed": 5}
        body = {"model": "m", "max_tokens": NUM_NEW, "ignore_eos": True, "stream": stream, **heat}
        if stream:
            body["stream_options"] = {"include_usage": True}
        if self.path == "/v1/completions":
            return body | {"prompt": PROMPT} | made
        return body | {"messages": [{"role": "user", "content": PROMPT}]} | made


def differs(answer: Answer, bare: Answer) -> bool:
    return bool(answer["ids"] != bare["ids"])


def same(answer: Answer, bare: Answer) -> bool:
    return bool(answer["ids"] == bare["ids"])


def stopped(answer: Answer, bare: Answer) -> bool:
    """Early, at something that matched."""
    count, finish = len(answer["ids"]), answer["finish_reason"]
    return bool(answer["ids"] == bare["ids"][:count] and count < NUM_NEW and finish["type"] == "stop")


def whole_text(pattern: str) -> Check:
    return lambda answer, bare: re.fullmatch(pattern, answer["text"], re.DOTALL) is not None


def _stop_text(bare: Answer) -> str:
    """Characters of several tokens of the bare text, none of them a broken one."""
    found = re.search("[^\ufffd]{2}", bare["text"][3:])
    assert found is not None, bare
    return found[0]


def _rules(**sampling: Any) -> Callable[[Answer], Body]:
    return lambda bare: {"sampling_params": dict(sampling)}


def _from_bare(make: Callable[[Answer], Body]) -> Callable[[Answer], Body]:
    return lambda bare: {"sampling_params": make(bare)}


def _fields(**body: Any) -> Callable[[Answer], Body]:
    return lambda bare: dict(body)


def _third_new(bare: Answer) -> list[int]:
    return [next(token for at, token in enumerate(bare["ids"]) if at >= 5 and token not in bare["ids"][:at])]


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a"],
    "additionalProperties": False,
}
TAG = {
    "type": "structural_tag",
    "triggers": ["<n"],
    "structures": [{"begin": "<n>", "schema": {"type": "boolean"}, "end": ";"}],
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}

STOPS = (
    Feature("stop string", _from_bare(lambda bare: {"stop": [_stop_text(bare), "zzz"]}), stopped),
    Feature(
        "stop string kept", _from_bare(lambda bare: {"stop": _stop_text(bare), "no_stop_trim": True}), stopped
    ),
    Feature(
        "stop_regex", _from_bare(lambda bare: {"stop_regex": f"{re.escape(_stop_text(bare))}$"}), stopped
    ),
    Feature("stop tokens", _from_bare(lambda bare: {"stop_token_ids": _third_new(bare)}), stopped),
    Feature(
        "min_new_tokens", _rules(min_new_tokens=5, ignore_eos=False, logit_bias={str(END_ID): 1e4}),
        lambda answer, bare: answer["ids"].index(END_ID) == len(answer["ids"]) - 1 == 5,
    ),
    Feature(
        "ignore_eos", _rules(logit_bias={str(END_ID): 1e4}),
        lambda answer, bare: answer["ids"] == [END_ID] * NUM_NEW and answer["text"] == "",
    ),
)  # fmt: skip
CHOOSING = (
    Feature("bare", _fields(), same),
    Feature("repetition_penalty", _rules(repetition_penalty=0.2), differs),
    Feature("frequency_penalty", _rules(frequency_penalty=-2.0), differs),
    Feature("presence_penalty", _rules(presence_penalty=-2.0, temperature=2.0), differs),
    Feature(
        "logit_bias", _from_bare(lambda bare: {"logit_bias": {str(bare["ids"][2]): -100.0}}),
        lambda answer, bare: bare["ids"][2] not in answer["ids"],
    ),
    Feature("min_p", _rules(min_p=0.3), differs, choices=("sampled",)),
    Feature("top_p", _rules(top_p=0.3), differs, choices=("sampled",)),
    Feature("top_k", _rules(top_k=2), differs, choices=("sampled",)),
    Feature(
        "bad_words", _from_bare(lambda bare: {"bad_words": [_stop_text(bare)]}),
        lambda answer, bare: _stop_text(bare) not in answer["text"],
    ),
    Feature(
        "thinking budget",
        lambda bare: {"require_reasoning": True, "sampling_params": {"thinking_budget": 3}},
        lambda answer, bare: answer["text"].find("</think>") in (1, 2, 3),
    ),
    Feature(
        "custom logit processor",
        lambda bare: {
            "custom_logit_processor": Fickle.to_str(), "sampling_params": {"custom_params": {"modulus": 2}}
        },
        differs,
    ),
    Feature("at most one draft", _rules(speculative_draft_len=1), same),
    Feature("no drafts", _rules(speculative_draft_len=0), same),
)  # fmt: skip
STRUCTURES = (
    Feature("JSON schema", _rules(json_schema=SCHEMA), whole_text(r'\s*\{.*')),
    Feature("JSON schema and penalty", _rules(json_schema=SCHEMA, presence_penalty=1.0, stop=["}"]),
            whole_text(r'\s*\{[^}]*')),
    Feature("regex", _rules(regex="(ab|ba|[c-z]{2}){1,4}0"), whole_text("(ab|ba|[c-z]{2}){1,4}0|[a-z]+")),
    Feature("EBNF", _rules(ebnf='root ::= "(" root ")" | "[" root root "]" | "x"'), whole_text(r"[][()x]+")),
    Feature("structural tag", _rules(structural_tag=TAG, logit_bias={"60": 9.0, "110": 9.0}), differs),
    Feature(
        "grammar behind reasoning",
        lambda bare: {
            "require_reasoning": True, "sampling_params": {"thinking_budget": 1, "regex": "[0-9]{3}"}
        },
        lambda answer, bare: re.search("</think>[0-9]{3}$", answer["text"]) is not None,
    ),
    Feature(
        "forced call of a tool",
        _fields(tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=60),
        lambda answer, bare: [name for name, _ in answer["calls"]] == ["f"],
        "/v1/chat/completions",
    ),
    Feature(
        "response_format",
        _fields(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}),
        lambda answer, bare: answer["content"].lstrip()[:1] == "{",
        "/v1/chat/completions",
    ),
)  # fmt: skip
TOLD = (
    Feature(
        "logprobs of the output", _fields(return_logprob=True),
        lambda answer, bare: [i for _, i, _ in answer["output_token_logprobs"]] == bare["ids"],
    ),
    Feature(
        "logprobs of the input",
        _fields(return_logprob=True, logprob_start_len=3, return_text_in_logprobs=True),
        lambda answer, bare: answer["input_token_logprobs"][0][0] is None and same(answer, bare),
    ),
    Feature(
        "top logprobs", _fields(return_logprob=True, logprob_start_len=0, top_logprobs_num=3),
        lambda answer, bare: [len(top) for top in answer["output_top_logprobs"]] == [3] * NUM_NEW,
    ),
    Feature(
        "logprobs by ids", _fields(return_logprob=True, logprob_start_len=0, token_ids_logprob=[7, 70]),
        lambda answer, bare: [[i for _, i, _ in told] for told in answer["output_token_ids_logprobs"]]
        == [[7, 70]] * NUM_NEW,
    ),
    Feature(
        "logprobs up to a stop",
        lambda bare: {"return_logprob": True, "sampling_params": {"stop": _stop_text(bare)}},
        lambda answer, bare: stopped(answer, bare)
        and len(answer["output_token_logprobs"]) == len(answer["ids"]),
    ),
    Feature(
        "logprobs with penalties and masks",
        lambda bare: {
            "return_logprob": True, "top_logprobs_num": 2,
            "sampling_params": {"presence_penalty": 1.5, "regex": "[a-z]{4,20}", "logit_bias": {"97": 2.0}},
        },
        lambda answer, bare: differs(answer, bare)
        and len(answer["output_top_logprobs"]) == len(answer["ids"]),
    ),
    Feature(
        "hidden states", _fields(return_hidden_states=True),
        lambda answer, bare: len(answer["hidden_states"]) == NUM_NEW and same(answer, bare),
    ),
    Feature(
        "last hidden state", _fields(return_hidden_states="last"),
        lambda answer, bare: isinstance(answer["hidden_states"][0], float) and same(answer, bare),
    ),
    Feature(
        "chat with logprobs", _fields(logprobs=True, top_logprobs=2),
        lambda answer, bare: len(answer["logprobs"]["content"]) == NUM_NEW, "/v1/chat/completions",
    ),
    Feature(
        "completion with echo and logprobs", _fields(echo=True, logprobs=2),
        lambda answer, bare: answer["text"] == PROMPT + bare["text"]
        and all(a <= b for a, b in pairwise(answer["logprobs"]["text_offset"])), "/v1/completions",
    ),
)  # fmt: skip
REST = (
    Feature("n > 1", _rules(n=3), lambda answer, bare: True),
    Feature("input_ids", _fields(input_ids=list(PROMPT.encode()), return_prompt_token_ids=True),
            lambda answer, bare: answer["prompt_token_ids"] == list(PROMPT.encode())),
    Feature(
        "special tokens shown", _rules(skip_special_tokens=False, logit_bias={str(END_ID): 6.0}),
        lambda answer, bare: answer["text"].count("<|end|>") == answer["ids"].count(END_ID) > 0,
    ),
    Feature(
        "special tokens skipped",
        _rules(spaces_between_special_tokens=False, logit_bias={str(END_ID): 6.0}),
        lambda answer, bare: "<|end|>" not in answer["text"] and END_ID in answer["ids"],
    ),
    Feature("stream_interval", _rules(stream_interval=4), same),
    Feature("high priority", _fields(priority=50), same),
    Feature("low priority", _fields(priority=-50), same),
    Feature("cache salt", _fields(cache_salt="a", extra_key="b"), same),
    Feature(
        "chat", _fields(separate_reasoning=True, chat_template_kwargs={"enable_thinking": True}),
        lambda answer, bare: answer["finish_reason"] == "length", "/v1/chat/completions",
    ),
    Feature(
        "completions", _fields(n=2, stop=["zzz"], return_token_ids=True),
        lambda answer, bare: len(answer["ids"]) == NUM_NEW, "/v1/completions",
    ),
)  # fmt: skip
FEATURES = (*STOPS, *CHOOSING, *STRUCTURES, *TOLD, *REST)
assert len({feature.name for feature in FEATURES}) == len(FEATURES)

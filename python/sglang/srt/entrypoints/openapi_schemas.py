"""JSON schemas of request bodies, from the types that read them. What a type doesn't say (ranges, the forms
that a value may have) is said here, under the field's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel, TypeAdapter

from sglang.srt.configs.parser_args import REASONING_PARSERS, TOOL_CALL_PARSERS
from sglang.srt.entrypoints.anthropic.messages import MessagesBody, PromptBody
from sglang.srt.entrypoints.native_wishes import MAX_NAMED_IDS, MAX_TOP_LOGPROBS
from sglang.srt.entrypoints.openai.protocol import ChatBody, CompletionBody
from sglang.srt.entrypoints.responses.body import ResponsesBody
from sglang.srt.sampling.sampling_params import (
    LARGEST_INT,
    LARGEST_NUMBER,
    MAX_BAD_WORDS,
    MAX_GRAMMAR_LEN,
    MAX_LOGIT_BIASES,
    MAX_STOP_IDS,
    MAX_STOPS,
    SamplingParams,
)

Schema = dict[str, Any]

REF: Final = "#/components/schemas/{model}"
_BODIES: Final[dict[str, type[BaseModel]]] = {
    "ChatBody": ChatBody,
    "CompletionBody": CompletionBody,
    "MessagesBody": MessagesBody,
    "PromptBody": PromptBody,
    "ResponsesBody": ResponsesBody,
}

_COUNT: Final = {"minimum": 1, "maximum": LARGEST_INT}
_FROM_0: Final = {"minimum": 0, "maximum": LARGEST_INT}
_SEED: Final = {"minimum": -(2**63), "maximum": 2**63 - 1}
RANGES: Final[dict[str, Schema]] = {
    "max_new_tokens": _FROM_0,
    "max_tokens": _FROM_0,
    "max_completion_tokens": _FROM_0,
    "max_output_tokens": _FROM_0,
    "min_new_tokens": _FROM_0,
    "min_tokens": _FROM_0,
    "temperature": {"minimum": 0, "maximum": LARGEST_NUMBER},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"exclusiveMinimum": 0, "maximum": 2},
    "n": {"minimum": 1, "maximum": 128},
    "stream_interval": _COUNT,
    "thinking_budget": {"minimum": -1, "maximum": LARGEST_INT},
    "thinking_token_budget": {"minimum": -1, "maximum": LARGEST_INT},
    "priority": {"minimum": -LARGEST_INT, "maximum": LARGEST_INT},
    "speculative_draft_len": _FROM_0,
    "sampling_seed": _SEED,
    "seed": _SEED,
    "top_logprobs": {"minimum": 0, "maximum": MAX_TOP_LOGPROBS},
}
_NAME: Final = {"type": "string", "minLength": 1}
_PROCESSOR: Final = '^[{]"callable": "([0-9a-f]{2})+"[}]$'
_PATTERN: Final = {**_NAME, "format": "regex"}
_BIASES: Final = {
    "type": "object",
    "description": "token id -> what is added to its logit",
    "maxProperties": MAX_LOGIT_BIASES,
    "patternProperties": {"^[0-9]{1,6}$": {"type": "number", "minimum": -1e30, "maximum": 1e30}},
    "additionalProperties": False,
}
_TEXT_GRAMMAR: Final = {"type": "string", "maxLength": MAX_GRAMMAR_LEN}
_JSON_GRAMMAR: Final = {"anyOf": [_TEXT_GRAMMAR, {"type": "object"}]}
FORMS: Final[dict[str, Schema]] = {
    "cache_salt": {"type": "string", "maxLength": 1024},
    "extra_key": {"type": "string", "maxLength": 1024},
    "custom_logit_processor": {"type": "string", "pattern": _PROCESSOR},
    "top_k": {"anyOf": [{"const": -1}, {"type": "integer", **_COUNT}]},
    "stop": {"anyOf": [_NAME, {"type": "array", "items": _NAME, "maxItems": MAX_STOPS}]},
    "stop_regex": {"anyOf": [_PATTERN, {"type": "array", "items": _PATTERN, "maxItems": MAX_STOPS}]},
    "bad_words": {"anyOf": [_NAME, {"type": "array", "items": _NAME, "maxItems": MAX_BAD_WORDS}]},
    "custom_params": {"type": "object"},
    "stop_token_ids": {
        "type": "array",
        "items": {"type": "integer", **_FROM_0},
        "maxItems": MAX_STOP_IDS,
    },
    "logit_bias": _BIASES,
    "regex": _TEXT_GRAMMAR,
    "ebnf": _TEXT_GRAMMAR,
    "json_schema": _JSON_GRAMMAR,
    "structural_tag": _JSON_GRAMMAR,
}

_TOKEN: Final = {"type": "integer", "minimum": 0}
_TOKENS: Final = {"type": "array", "items": _TOKEN, "minItems": 1}
_TEXT: Final = {"type": "string"}
_SALT: Final = {"type": "string", "maxLength": 1024}
_TEXTS: Final = {"type": "array", "items": _TEXT, "minItems": 1}
_BOOL: Final = {"type": "boolean"}
_PART: Final = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": _TEXT},
}


def _several(one: Schema) -> Schema:
    return {"anyOf": [one, {"type": "array", "items": one, "minItems": 1}]}


def _object(required: tuple[str, ...] = (), /, **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties} | ({"required": list(required)} if required else {})


_CALL: Final = _object(
    ("function",),
    id=_TEXT,
    type={"const": "function"},
    function=_object(("name",), name=_TEXT, arguments={"anyOf": [_TEXT, {"type": "object"}]}),
)


_TOOL: Final = _object(
    ("type", "function"),
    type={"const": "function"},
    function=_object(("name",), name=_NAME, description=_TEXT, parameters={"type": "object"}),
)
_TOOLS: Final = {"type": "array", "items": _TOOL}
_CONTENT: Final = {"anyOf": [_TEXT, {"type": "array", "items": _PART}]}
_SAID: Final = _object(
    ("role", "content"),
    role={"enum": ["system", "developer", "user", "tool"]},
    content=_CONTENT,
    tool_call_id=_TEXT,
)
_REPLIED: Final = _object(
    ("role",),
    role={"const": "assistant"},
    content={"anyOf": [_CONTENT, {"type": "null"}]},
    tool_calls={"type": "array", "items": _CALL},
)
_CHAT: Final[dict[str, Schema]] = {
    "messages": {"type": "array", "items": {"anyOf": [_SAID, _REPLIED]}},
    "tools": _TOOLS,
}
_ITEM: Final = {
    "anyOf": [
        _object(
            ("role", "content"), role={"enum": ["user", "assistant", "system", "developer"]}, content=_TEXT
        ),
        _object(
            ("type", "call_id", "name", "arguments"),
            type={"const": "function_call"},
            call_id=_TEXT,
            name=_NAME,
            arguments=_TEXT,
        ),
        _object(
            ("type", "call_id", "output"), type={"const": "function_call_output"}, call_id=_TEXT, output=_TEXT
        ),
    ]
}
_FUNCTION: Final = _object(
    ("type", "name"),
    type={"const": "function"},
    name=_NAME,
    description=_TEXT,
    parameters={"type": "object"},
)
_RESPONSES: Final[dict[str, Schema]] = {
    "input": {"anyOf": [_TEXT, {"type": "array", "items": _ITEM, "minItems": 1}]},
    "tools": {"type": "array", "items": _FUNCTION},
}
_BLOCK: Final = {"anyOf": [_PART, _object(("type",), type={"enum": ["tool_use", "tool_result", "thinking"]})]}
_TURN: Final = _object(
    ("role", "content"),
    role={"enum": ["user", "assistant"]},
    content={"anyOf": [_TEXT, {"type": "array", "items": _BLOCK}]},
)
_ANTHROPIC: Final[dict[str, Schema]] = {"messages": {"type": "array", "items": _TURN, "minItems": 1}}
_HARMLESS: Final[dict[str, Schema]] = {"metadata": {"type": "object"}, "service_tier": _TEXT, "stream": _BOOL}
_COMPLETION: Final[dict[str, Schema]] = {
    "prompt": {"anyOf": [*_several(_NAME)["anyOf"], *_several(_TOKENS)["anyOf"]]},
    "logprobs": {"anyOf": [{"const": False}, {"type": "integer", "minimum": 0, "maximum": MAX_TOP_LOGPROBS}]},
}
_OWN_FORMS: Final[Mapping[str, dict[str, Schema]]] = {
    "ChatBody": _CHAT,
    "CompletionBody": _COMPLETION,
    "MessagesBody": _ANTHROPIC,
    "PromptBody": _ANTHROPIC,
    "ResponsesBody": _RESPONSES,
}

_GENERATE: Final = _object(
    text=_several(_NAME),
    input_ids=_several(_TOKENS),
    sampling_params=_several({"$ref": REF.format(model="SamplingParams")}),
    rid=_several(_TEXT),
    priority=_several({"type": "integer", "minimum": -LARGEST_INT, "maximum": LARGEST_INT}),
    cache_salt=_several(_SALT),
    extra_key=_several(_SALT),
    custom_logit_processor=_several({"type": "string", "pattern": _PROCESSOR}),
    stream=_BOOL,
    log_metrics=_BOOL,
    no_logs=_BOOL,
    require_reasoning=_BOOL,
    return_prompt_token_ids=_BOOL,
    return_logprob=_several(_BOOL),
    logprob_start_len=_several({"type": "integer", "minimum": -1}),
    top_logprobs_num=_several({"type": "integer", "minimum": 0, "maximum": MAX_TOP_LOGPROBS}),
    token_ids_logprob=_several({"type": "array", "items": _TOKEN, "maxItems": MAX_NAMED_IDS}),
    return_text_in_logprobs=_BOOL,
    return_hidden_states=_several({"enum": [True, False, "last"]}),
) | {
    "description": "either text or input_ids; lists of them are a batch",
    "oneOf": [{"required": ["text"]}, {"required": ["input_ids"]}],
}

BY_HAND: Final[dict[str, Schema]] = {  # bodies that no class stands for
    "GenerateBody": _GENERATE,
    "AbortBody": _object(rid=_NAME, abort_all=_BOOL),
    "InternalStateBody": _object(
        ("server_args",),
        server_args={
            "type": "object",
            "minProperties": 1,
            "properties": {
                "speculative_disable_bs_threshold": {
                    "anyOf": [_FROM_0 | {"type": "integer"}, {"const": "auto"}]
                },
                "speculative_bs_schedule": _TEXT,
            },
        },
    ),
    "PauseBody": _object(mode={"enum": ["abort", "retract", "in_place"]}),
    "ContinueBody": _object(),
    "LoggingBody": _object(
        log_requests=_BOOL, log_requests_level={"type": "integer", "minimum": 0, "maximum": 3}
    ),
    "TokenizeBody": {
        "anyOf": [
            _object(("prompt",), prompt=_several(_TEXT), add_special_tokens=_BOOL),
            _object(
                ("messages",),
                messages=_CHAT["messages"],
                add_generation_prompt=_BOOL,
                continue_final_message=_BOOL,
                add_special_tokens=_BOOL,
                tools=_TOOLS,
                chat_template_kwargs={"type": "object"},
                reasoning_effort=_TEXT,
            ),
        ]
    },
    "DetokenizeBody": _object(("tokens",), tokens=_several(_TOKENS), skip_special_tokens=_BOOL),
    "ParseFunctionCallBody": _object(
        ("text", "tool_call_parser"),
        text=_TEXT,
        tools=_TOOLS,
        tool_call_parser={"enum": list(TOOL_CALL_PARSERS)},
    ),
    "SeparateReasoningBody": _object(
        ("text", "reasoning_parser"), text=_TEXT, reasoning_parser={"enum": list(REASONING_PARSERS)}
    ),
}


def body_schemas(vocab_size: int = LARGEST_INT) -> dict[str, Schema]:
    """Of all request bodies, and of what they refer to, by name."""
    made: dict[str, Schema] = {"SamplingParams": _completed(TypeAdapter(SamplingParams).json_schema(), {})}
    for name, kind in _BODIES.items():
        schema = kind.model_json_schema(ref_template=REF)
        made |= schema.pop("$defs", {})
        made[name] = _completed(schema, _OWN_FORMS.get(name, {}))
    for name in ("MessagesBody", "PromptBody"):  # they refuse what they don't know
        known = {**_HARMLESS, **made[name]["properties"]}
        made[name] = {**made[name], "properties": known, "additionalProperties": False}
    return {name: _with_vocabulary(schema, vocab_size) for name, schema in (made | BY_HAND).items()}


def _with_vocabulary(schema: Any, vocab_size: int) -> Any:
    """With the largest id wherever one is taken."""
    if schema == _TOKEN:
        return {**_TOKEN, "maximum": vocab_size - 1}
    if isinstance(schema, dict):
        return {name: _with_vocabulary(value, vocab_size) for name, value in schema.items()}
    return [_with_vocabulary(item, vocab_size) for item in schema] if isinstance(schema, list) else schema


def _completed(schema: Schema, own: Mapping[str, Schema]) -> Schema:
    properties = {name: _property(name, value, own) for name, value in schema["properties"].items()}
    return {**schema, "properties": properties}


def _property(name: str, schema: Schema, own: Mapping[str, Schema]) -> Schema:
    form = own.get(name) or FORMS.get(name)
    if form is None and name not in RANGES:
        return schema
    kept = {key: schema[key] for key in ("title", "default") if key in schema}
    branches = schema.get("anyOf", [schema])
    if form is None:
        kind = next(branch["type"] for branch in branches if branch.get("type") in ("integer", "number"))
        form = {"type": kind, **RANGES[name]}
    if {"type": "null"} not in branches:
        return kept | form
    return kept | {"anyOf": [*form.get("anyOf", [form]), {"type": "null"}]}

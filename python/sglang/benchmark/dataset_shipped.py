"""The prompts that ship with this package: code, tool calls over several turns, chat.

`data/README.md` says where they come from.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from sglang.benchmark.prompt_row import DatasetOptions, Message, PromptRow

DATA: Final = Path(__file__).resolve().parent / "data"
CODE_REQUEST: Final = "Complete the following Python function.\n```python\n{code}```"
TOOL_SYSTEM: Final = (
    "You are a function calling assistant. You have access to these tools:\n{tools}\n"
    'Answer with a JSON list of calls like [{{"name": ..., "arguments": {{...}}}}].'
    " The results of your calls are given to you with the next message."
)
SHIPPED_OUTPUT_LEN: Final = 256

Json = dict[str, Any]


def _read(name: str) -> list[Json]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


def humaneval(options: DatasetOptions) -> list[PromptRow]:
    """Problems of HumanEval, each as one user turn."""
    problems = [row for row in _read("humaneval.jsonl") if row["held_out"] or not options.held_out]
    return _user_turns([CODE_REQUEST.format(code=row["code"]) for row in problems], "coding", options)


def chat(options: DatasetOptions) -> list[PromptRow]:
    """Questions and small tasks in everyday words, each as one user turn."""
    return _user_turns([row["question"] for row in _read("chat.jsonl")], "chat", options)


def bfcl(options: DatasetOptions) -> list[PromptRow]:
    """Conversations of an agent with its tools. A row is one turn with all that came before it.

    Enough conversations are taken, in an order set by the seed, for ``num_prompts`` rows; all of them go
    on side by side: first the first turns, then the second ones, and so on. So the tools (the long common
    prefix of all conversations with the same services) and each conversation's own past come again.
    """
    conversations = _read("bfcl.jsonl")
    uses = Counter(call["name"] for row in conversations for turn in row["turns"] for call in turn["calls"])
    tools = sorted(_read("bfcl_tools.jsonl"), key=lambda tool: -uses[tool["name"]])
    random.Random(options.seed).shuffle(conversations)
    turns: list[tuple[int, PromptRow]] = []
    for row in conversations:
        if len(turns) >= options.num_prompts:
            break
        turns += enumerate(_agent_rows(row, tools, options))
    return [row for _, row in sorted(turns, key=lambda turn: turn[0])]


def shipped_texts() -> list[str]:
    """What is asked in all of them, as plain texts."""
    agents = [turn["user"] for row in _read("bfcl.jsonl") for turn in row["turns"]]
    code = [row["code"] for row in _read("humaneval.jsonl")]
    return [*code, *(row["question"] for row in _read("chat.jsonl")), *agents]


def _user_turns(texts: Sequence[str], domain: str, options: DatasetOptions) -> list[PromptRow]:
    picked = list(texts)
    random.Random(options.seed).shuffle(picked)
    return [_conversation([{"role": "user", "content": t}], domain, None, options) for t in picked]


def _agent_rows(row: Json, tools: Sequence[Json], options: DatasetOptions) -> Iterator[PromptRow]:
    theirs = [t for t in tools if t["service"] in row["services"]][: options.max_tools]
    functions = [
        {"name": t["name"], "description": t["description"], "parameters": _schema(t["parameters"])}
        for t in theirs
    ]
    native = [{"type": "function", "function": f} for f in functions] if options.native_tools else None
    past: list[Message] = []
    if native is None:
        past.append({"role": "system", "content": TOOL_SYSTEM.format(tools=json.dumps(functions))})
    for number, turn in enumerate(row["turns"]):
        if native is None:
            past.append(_text_question(row["turns"], number))
        else:
            past.append({"role": "user", "content": turn["user"]})
        yield _conversation(list(past), "agentic", native, options)
        if native is None:
            past.append({"role": "assistant", "content": json.dumps(turn["calls"])})
        else:
            past += _native_calls(turn, number)


def _text_question(turns: Sequence[Json], number: int) -> Message:
    """The user's turn, after the results of the calls before it: every chat template takes turns."""
    text = turns[number]["user"]
    if number:
        text = f"Results: {json.dumps(turns[number - 1]['results'])}\n\n{text}"
    return {"role": "user", "content": text}


def _native_calls(turn: Json, number: int) -> list[Message]:
    calls = [
        {
            "id": f"call_{number}_{index}",
            "type": "function",
            "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])},
        }
        for index, call in enumerate(turn["calls"])
    ]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": result}
        for call, result in zip(calls, turn["results"], strict=True)
    ]
    return [{"role": "assistant", "content": "", "tool_calls": calls}, *results] if calls else []


def _schema(parameters: Json) -> Json:
    """The leaderboard's names of types as JSON schema has them."""
    names = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
    if isinstance(parameters, list):
        return [_schema(p) for p in parameters]  # type: ignore[return-value]
    if not isinstance(parameters, dict):
        return parameters
    return {
        key: names.get(value, value) if key == "type" and isinstance(value, str) else _schema(value)
        for key, value in parameters.items()
    }


def _conversation(
    messages: list[Message], domain: str, tools: list[Json] | None, options: DatasetOptions
) -> PromptRow:
    length = options.output_len or SHIPPED_OUTPUT_LEN
    if options.tokenizer is None:
        return PromptRow(messages, 0, length, messages, domain, tools)
    text = options.tokenizer.apply_chat_template(messages, tools)
    return PromptRow(text, options.count(text), length, messages, domain, tools)

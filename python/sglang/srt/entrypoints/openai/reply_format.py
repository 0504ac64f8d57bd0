"""How the reply to a chat request is to be read: from its tools, the server's parsers and the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sglang.srt.constrained.tools import tools_grammar
from sglang.srt.entrypoints.openai.protocol import ChatBody
from sglang.srt.function_call.registry import FORCED, TOOL_FORMATS, ToolFormat
from sglang.srt.function_call.tools import Tools
from sglang.srt.managers.text_request import RequestError, Sample
from sglang.srt.parser.reasoning import REASONING_FORMATS, ReasoningFormat
from sglang.srt.parser.reply import ReplyFormat
from sglang.srt.sampling.sampling_params import ReasoningEnd
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.text_tokenizer import TextTokenizer


def offered_tools(body: ChatBody) -> list[dict[str, Any]]:
    """The tools that the model is told of; none with ``tool_choice`` none.

    Raises:
        RequestError: a tool, or the choice, is not what it must be.
    """
    tools = body.tools or []
    check_tools(tools)
    choice = body.tool_choice
    if choice in (None, "auto"):
        return tools
    if choice == "none":
        return []
    named = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = named.get("name") if isinstance(named, dict) else None
    if choice != "required" and not isinstance(name, str):
        raise RequestError(
            'tool_choice must be "auto", "none", "required" or'
            ' {"type": "function", "function": {"name": ...}}'
        )
    if isinstance(name, str) and name not in tool_names(tools).names:
        raise RequestError(f"tool_choice names {name!r}, which is not among the tools")
    if not tools:
        raise RequestError('tool_choice "required" needs tools')
    return tools


def check_tools(tools: Any) -> None:
    """
    Raises:
        RequestError: they are no list of functions.
    """
    if not isinstance(tools, list):
        raise RequestError("tools must be a list")
    for number, tool in enumerate(tools):
        _check_tool(f"tools[{number}]", tool)


def _check_tool(where: str, tool: Any) -> None:
    function = tool.get("function") if isinstance(tool, dict) else None
    if (
        not isinstance(tool, dict)
        or tool.get("type", "function") != "function"
        or not isinstance(function, dict)
    ):
        raise RequestError(f'{where} must be {{"type": "function", "function": {{"name": ...}}}}')
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise RequestError(f"{where}.function.name must be a string that is not empty")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise RequestError(f"{where}.function.parameters must be a JSON schema (an object)")


def forced_calls(body: ChatBody, tools: Sequence[Mapping[str, Any]]) -> str | None:
    """The JSON schema of a reply that must be calls; None where it need not be.

    Raises:
        RequestError: the reply is to be something else as well.
    """
    grammar = tools_grammar(tools, body.tool_choice, body.parallel_tool_calls)
    if grammar is None:
        return None
    form = body.response_format if isinstance(body.response_format, dict) else {}
    others = {"json_schema": body.json_schema, "regex": body.regex, "ebnf": body.ebnf}
    given = [name for name, value in others.items() if value is not None]
    given += ["response_format"] if form.get("type", "text") != "text" else []
    if given:
        raise RequestError(f"tool_choice asks for calls, and {given[0]} for another reply: leave one out")
    return grammar.text


def needs_special_tokens(body: ChatBody, args: ServerArgs, tools: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the marks of what is to be found in the reply are among them."""
    reasoning, tool_format = _formats(body, args, tools)
    of_reasoning = reasoning is not None and reasoning.special_tokens
    return of_reasoning or (tool_format is not None and tool_format.special_tokens)


def _formats(
    body: ChatBody, args: ServerArgs, tools: Sequence[Mapping[str, Any]]
) -> tuple[ReasoningFormat | None, ToolFormat | None]:
    reasoning = REASONING_FORMATS.get(args.reasoning_parser or "") if body.separate_reasoning else None
    if forced_calls(body, tools) is not None:
        return reasoning, FORCED
    return reasoning, TOOL_FORMATS.get(args.tool_call_parser or "") if tools else None


def tool_names(tools: Sequence[Mapping[str, Any]]) -> Tools:
    functions = [tool["function"] for tool in tools]
    return Tools({function["name"]: function.get("parameters") or {} for function in functions})


def reply_format(
    body: ChatBody, args: ServerArgs, tools: Sequence[Mapping[str, Any]], prompt_end: str
) -> ReplyFormat:
    """``prompt_end``: the end of the prompt, as text."""
    reasoning, tool_format = _formats(body, args, tools)
    return ReplyFormat(
        reasoning=reasoning,
        reasoning_is_open=reasoning is not None and _is_open(reasoning, prompt_end, _begun(body)),
        stream_reasoning=body.stream_reasoning,
        tool_format=tool_format,
        tools=tool_names(tools),
        parallel_calls=body.parallel_tool_calls,
    )


def _begun(body: ChatBody) -> str:
    """The part of the reply that the client has written."""
    content = body.messages[-1].get("content") if body.continue_final_message and body.messages else None
    return content if isinstance(content, str) else ""


def _is_open(form: ReasoningFormat, prompt: str, begun: str) -> bool:
    if form.begin in begun or form.end in begun:
        return begun.rfind(form.begin) > begun.rfind(form.end)
    return form.is_open(prompt.removesuffix(begun))


def reasoning_end(
    body: ChatBody, args: ServerArgs, prompt: str, tokenizer: TextTokenizer
) -> ReasoningEnd | None:
    """Where a grammar begins. ``prompt``: its end is enough."""
    form = REASONING_FORMATS.get(args.reasoning_parser or "")
    if form is None:
        return None
    if _is_open(form, prompt, _begun(body)):
        return ReasoningEnd(form.end)
    begin_id = tokenizer.token_id(form.begin)
    if begin_id is None or form.end in _begun(body) or prompt.rstrip().endswith(form.end):
        return None
    return ReasoningEnd(form.end, begin_id)  # the model may begin one


def reasoning_tokens(sample: Sample, form: ReplyFormat, tokenizer: TextTokenizer) -> int:
    """Ids of the reply up to the end of its reasoning; 0 where the marks are no tokens of their own."""
    if form.reasoning is None:
        return 0
    begin, end = (tokenizer.token_id(mark) for mark in (form.reasoning.begin, form.reasoning.end))
    ids = sample.output_ids
    if end is None or not (form.reasoning_is_open or begin in ids[:2]):
        return 0
    return ids.index(end) + 1 if end in ids else len(ids)

"""Messages of a chat as a prompt, by the model's own Jinja template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import meta
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sglang.srt.managers.templates_kimi import sorted_deeply, typescript_tools
from sglang.srt.managers.text_request import RequestError
from sglang.srt.utils.text_tokenizer import TextTokenizer, TokenizerError

_DEFAULT: Final = "default"
_FOR_TOOLS: Final = "tool_use"
_TOOL_VARIABLES: Final = frozenset({"tools", "tools_ts_str"})
_SET_HERE: Final = frozenset({"messages", "add_generation_prompt", "self"})


class _GenerationBlock(Extension):
    """``{% generation %}`` marks what training learns; for serving its contents are ordinary text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """``tool_source``: of the template for requests with tools, where a model has one of its own."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        tool_source: str | None = None,
        is_kimi: bool = False,
    ) -> None:
        """
        Raises:
            TokenizerError: a template is not valid Jinja.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
            self._tool_template = environment.from_string(tool_source or source)
        except jinja2.TemplateSyntaxError as error:
            raise TokenizerError(f"the chat template is not valid Jinja: {error}") from error
        self._special_tokens = dict(special_tokens)
        variables = meta.find_undeclared_variables(environment.parse(tool_source or source))
        self.takes_tools = not variables.isdisjoint(_TOOL_VARIABLES)
        self._is_kimi = is_kimi or "tools_ts_str" in source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        asks_for_reply: bool = True,
    ) -> str:
        """The prompt that asks for the next message (or for the rest of the last one), or the messages alone.

        Raises:
            RequestError: the template does not take these messages.
        """
        ours = sorted(_SET_HERE.intersection(options or {}))
        if ours:
            raise RequestError(f"chat_template_kwargs can't set {', '.join(ours)}: the server does")
        rest = ""
        if continue_final_message:
            if not messages or messages[-1].get("role") != "assistant":
                raise RequestError("continue_final_message needs a last message whose role is assistant")
            messages, rest = messages[:-1], messages[-1].get("content") or ""
        values = {**self._special_tokens, **self._tool_values(tools), **(options or {})}
        template = self._tool_template if values["tools"] else self._template
        try:
            prompt = template.render(messages=messages, add_generation_prompt=asks_for_reply, **values)
        except (jinja2.TemplateError, TypeError, KeyError) as error:
            raise RequestError(f"the chat template refuses these messages: {error}") from error
        return prompt + rest

    def _tool_values(self, tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
        given = list(tools) if tools else None
        if not self._is_kimi:
            return {"tools": given, "documents": None}
        # What Moonshot's own code hands to the template.
        given = sorted_deeply(given)
        values = {"tools": given, "documents": None, "thinking": True, "preserve_thinking": False}
        declared = typescript_tools(given) if given else None
        return values if declared is None else {**values, "tools_ts_str": declared}


def load_chat_template(tokenizer: TextTokenizer, given: str | None) -> ChatTemplate | None:
    """The template in the file ``given``, else the tokenizer's; None where there is none.

    Raises:
        TokenizerError: it can't be read.
    """
    sources = _own_sources(tokenizer) if given is None else {_DEFAULT: read_template(Path(given))}
    source = sources.get(_DEFAULT)
    if source is None:
        return None
    tokens = tokenizer.special_tokens()
    return ChatTemplate(source, tokens, sources.get(_FOR_TOOLS), tokenizer.is_kimi)


def _own_sources(tokenizer: TextTokenizer) -> dict[str, str]:
    """Name -> template, from every place where transformers looks for them; a file of its own comes first."""
    sources: dict[str, str] = {}
    for config in (tokenizer.config, _processor_config(tokenizer.folder)):
        found = config.get("chat_template")
        named = found if isinstance(found, list) else [{"name": _DEFAULT, "template": found}]
        for entry in named:
            if isinstance(entry, dict) and isinstance(entry.get("template"), str):
                sources[str(entry.get("name"))] = entry["template"]
    for file in sorted((tokenizer.folder / "additional_chat_templates").glob("*.jinja")):
        sources[file.stem] = read_template(file)
    file = tokenizer.folder / "chat_template.jinja"
    if file.is_file():
        sources[_DEFAULT] = read_template(file)
    return sources


def _processor_config(folder: Path) -> dict[str, Any]:
    """``chat_template.json``, which models that read images have beside their tokenizer's config."""
    file = folder / "chat_template.json"
    if not file.is_file():
        return {}
    try:
        value = json.loads(read_template(file))
    except ValueError as error:
        raise TokenizerError(f"{file} is not valid JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def read_template(file: Path) -> str:
    """
    Raises:
        TokenizerError: it can't be read.
    """
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TokenizerError(
            f"the chat template {file} can't be read: {reason} (a Jinja file is needed: none are built in)"
        ) from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """transformers' filter: unlike Jinja's own it leaves <, > and & alone."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)

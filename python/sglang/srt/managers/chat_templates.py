"""Messages of a chat as a prompt, by the model's own Jinja template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sglang.srt.managers.text_request import RequestError
from sglang.srt.utils.text_tokenizer import TextTokenizer, TokenizerError

_SET_HERE: Final = frozenset({"messages", "add_generation_prompt", "self"})


class _GenerationBlock(Extension):
    """``{% generation %}`` marks what training learns; for serving its contents are ordinary text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """
        Raises:
            TokenizerError: the template is not valid Jinja.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TokenizerError(f"the chat template is not valid Jinja: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """The prompt that asks for the next message (or for the rest of the last one).

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
        values = {**self._special_tokens, "tools": None, **(options or {})}
        try:
            prompt = self._template.render(messages=messages, add_generation_prompt=True, **values)
        except (jinja2.TemplateError, TypeError, KeyError) as error:
            raise RequestError(f"the chat template refuses these messages: {error}") from error
        return prompt + rest


def load_chat_template(tokenizer: TextTokenizer, given: str | None) -> ChatTemplate | None:
    """The template in the file ``given``, else the tokenizer's; None where there is none.

    Raises:
        TokenizerError: it can't be read.
    """
    source = _own_source(tokenizer) if given is None else _read_template(Path(given))
    return None if source is None else ChatTemplate(source, tokenizer.special_tokens())


def _own_source(tokenizer: TextTokenizer) -> str | None:
    file = tokenizer.folder / "chat_template.jinja"
    if file.is_file():
        return _read_template(file)
    source = tokenizer.config.get("chat_template")
    if isinstance(source, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    return source if isinstance(source, str) else None


def _read_template(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TokenizerError(
            f"the chat template {file} can't be read: {reason} (a Jinja file is needed: none are built in)"
        ) from error


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)

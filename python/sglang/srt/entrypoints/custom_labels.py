"""Labels of metrics that requests bring: of the allowed names alone, in a header or in /generate's body."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from sglang.srt.managers.text_request import RequestError, TextRequest
from sglang.srt.server_args import ServerArgs

LONGEST_VALUE: Final = 128


def labelled(
    requests: Sequence[TextRequest], args: ServerArgs, headers: Mapping[str, str], given: Any = None
) -> list[TextRequest]:
    """With the values of the allowed labels; empty ones where nothing is said.

    Raises:
        RequestError: they are not texts by name, or ``given`` (the body's) has another name. Of the header
            other names are passed over, as in SGLang: it may be meant for several servers.
    """
    allowed = args.tokenizer_metrics_allowed_custom_labels
    if allowed is None:
        if given:
            raise RequestError(
                "custom_labels is for servers started with --tokenizer-metrics-allowed-custom-labels NAME …"
            )
        return list(requests)
    name = args.tokenizer_metrics_custom_labels_header
    labels = _texts(f"the header {name}", _header(headers.get(name), name), allowed)
    if given is not None:
        labels |= _texts("custom_labels", given, allowed)
        unknown = sorted(set(given) - set(allowed))
        if unknown:
            raise RequestError(
                f"custom_labels: {', '.join(unknown)} is not among this server's labels: {', '.join(allowed)}"
            )
    values = tuple(labels.get(label, "") for label in allowed)
    return [replace(request, labels=values) for request in requests]


def _header(text: str | None, name: str) -> Any:
    if text is None:
        return {}
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the header {name} is not valid JSON") from error


def _texts(where: str, value: Any, allowed: Sequence[str]) -> dict[str, str]:
    if not isinstance(value, dict):
        raise RequestError(f'{where} must be an object of texts by name: {{"{allowed[0]}": "…"}}')
    taken = {label: value[label] for label in allowed if label in value}
    for label, text in taken.items():
        if not isinstance(text, str) or len(text) > LONGEST_VALUE or not text.isprintable():
            raise RequestError(
                f"{where}: {label} must be a printable text of at most {LONGEST_VALUE} characters"
            )
    return taken

"""Flags of the metrics: borders of histograms, and labels of the user's own."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Sequence
from typing import Final

from sglang.srt.utils.flags import ServerArgsError

_TOKENS: Final = (
    100, 300, 500, 1000, 2000, 3000, 5000, 7000, 10_000, 20_000, 30_000, 50_000, 70_000, 100_000, 200_000,
    500_000, 1_000_000,
)  # fmt: skip
_LABEL: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_TAKEN: Final = frozenset(
    {
        "model_name", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank", "is_streaming", "stage", "mode",
        "le", "phase",
    }
)  # fmt: skip
CUSTOM_LABELS_HEADER: Final = "x-custom-labels"
_MOST_CUSTOM_LABELS: Final = 8
_HEADER: Final = re.compile(r"[a-zA-Z0-9!#$%&'*+.^_`|~-]+")


def check_borders(name: str, borders: Sequence[float] | None) -> None:
    """
    Raises:
        ServerArgsError: not numbers above 0 that rise.
    """
    if borders is None:
        return
    rising = all(a < b for a, b in zip(borders, borders[1:], strict=False))
    if not (rising and all(math.isfinite(border) and border > 0 for border in borders)):
        raise ServerArgsError(f"{name} takes numbers above 0 that rise, got {' '.join(map(str, borders))}")


def token_borders(name: str, words: Sequence[str] | None) -> tuple[float, ...]:
    """``default``; ``custom B1 B2 …``; ``tse MIDDLE BASE COUNT``: BASE, BASE², … to both sides.

    Raises:
        ServerArgsError: none of these.
    """
    if words is None or tuple(words) == ("default",):
        return _TOKENS
    kind, *rest = words
    try:
        numbers = [float(word) for word in rest]
    except ValueError:
        numbers = []
    if kind == "tse" and len(numbers) == 3 and numbers[1] > 1 and 2 <= numbers[2] <= 100:
        middle, base, count = numbers
        distances = [base**i for i in range(1, int(count) // 2 + 1)]
        borders = [*(middle - d for d in reversed(distances)), middle, *(middle + d for d in distances)]
        borders = [border for border in borders if border > 0]
    elif kind == "custom" and numbers:
        borders = sorted(set(numbers))
    else:
        raise ServerArgsError(
            f"{name} takes: default; custom and borders; or tse, the middle, a base above 1 and a number of"
            f" borders; got {' '.join(words)}"
        )
    check_borders(name, borders)
    return tuple(borders)


def parse_labels(text: str | None) -> dict[str, str]:
    """
    Raises:
        ServerArgsError: no JSON object of names and texts, or a name that is taken.
    """
    if text is None:
        return {}
    try:
        labels = json.loads(text)
    except ValueError as error:
        raise ServerArgsError(f"--extra-metric-labels is not valid JSON: {error}") from error
    if not isinstance(labels, dict) or not all(isinstance(value, str) for value in labels.values()):
        raise ServerArgsError('--extra-metric-labels takes a JSON object of texts: {"zone": "a"}')
    for name in labels:
        _check_label("--extra-metric-labels", name)
    return labels


def _check_label(flag: str, name: str) -> None:
    if not _LABEL.fullmatch(name) or name.startswith("__") or name in _TAKEN:
        raise ServerArgsError(f"{flag}: {name!r} is taken, or can't be a label's name")


def check_custom_labels(names: Sequence[str] | None, header: str, others: Collection[str]) -> None:
    """``others``: labels that all requests have.

    Raises:
        ServerArgsError: a name is taken or can't be one, there are too many, or the header can't be one, or
            has no use.
    """
    flag = "--tokenizer-metrics-allowed-custom-labels"
    if not _HEADER.fullmatch(header):
        raise ServerArgsError(
            f"--tokenizer-metrics-custom-labels-header: {header!r} can't be a header's name"
        )
    if names is None and header != CUSTOM_LABELS_HEADER:
        raise ServerArgsError(f"--tokenizer-metrics-custom-labels-header needs {flag}")
    if names is None:
        return
    for name in names:
        _check_label(flag, name)
    if len({*names, *others}) < len(names) + len(others):
        raise ServerArgsError(f"{flag}: a name is there twice, or in --extra-metric-labels too")
    if len(names) > _MOST_CUSTOM_LABELS:
        raise ServerArgsError(f"{flag} takes at most {_MOST_CUSTOM_LABELS} names, got {len(names)}")

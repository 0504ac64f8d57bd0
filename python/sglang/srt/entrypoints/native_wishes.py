"""What a body of POST /generate wants to know beside the text: log-probabilities, hidden states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sglang.srt.managers.io_struct import RequestWish
from sglang.srt.managers.text_request import RequestError

MAX_TOP_LOGPROBS: Final = 1024
MAX_NAMED_IDS: Final = 1024
FIELDS: Final = (
    "return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob", "return_text_in_logprobs",
    "return_hidden_states",
)  # fmt: skip


def wishes(body: Mapping[str, Any], count: int) -> list[RequestWish | None]:
    """Of each of ``count`` prompts; None: nothing is wished.

    Raises:
        RequestError: a field has the wrong type, or is out of range.
    """
    columns = zip(
        _each(body, "return_logprob", count, False, _boolean),
        _each(body, "logprob_start_len", count, -1, _start),
        _each(body, "top_logprobs_num", count, 0, _number),
        _named(body.get("token_ids_logprob"), count),
        _each(body, "return_hidden_states", count, "", _hidden),
        strict=True,
    )
    return [_wish(*values) for values in columns]


def _wish(
    logprobs: bool, start: int, num_top: int, token_ids: tuple[int, ...], hidden: str
) -> RequestWish | None:
    if not logprobs and not hidden:
        return None
    if not logprobs:
        return RequestWish(hidden_states=hidden)
    return RequestWish(True, start, num_top, token_ids or None, hidden)


def _each(body: Mapping[str, Any], name: str, count: int, default: Any, check: Any) -> list[Any]:
    """One value for all prompts, or a list with one for each."""
    given = body.get(name)
    values = given if isinstance(given, list) else [given] * count
    if len(values) != count:
        raise RequestError(f"{name} has {len(values)} entries for {count} prompts")
    return [default if value is None else check(name, value) for value in values]


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false, got {value!r}")
    return value


def _start(name: str, value: Any) -> int:
    if type(value) is not int or value < -1:
        raise RequestError(
            f"{name} must be the place in the prompt where log-probabilities begin, or -1 for those of the"
            f" answer alone; got {value!r}"
        )
    return value


def _number(name: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MAX_TOP_LOGPROBS:
        raise RequestError(f"{name} must be an integer from 0 to {MAX_TOP_LOGPROBS}, got {value!r}")
    return value


def _hidden(name: str, value: Any) -> str:
    if value == "last":
        return "last"
    if not isinstance(value, bool):
        raise RequestError(f'{name} must be true, false or "last", got {value!r}')
    return "all" if value else ""


def _named(given: Any, count: int) -> list[tuple[int, ...]]:
    """A list of ids for all prompts, or a list of such lists."""
    if given is None:
        return [()] * count
    lists = given if isinstance(given, list) and any(not _is_id(item) for item in given) else [given] * count
    if len(lists) != count:
        raise RequestError(f"token_ids_logprob has {len(lists)} lists for {count} prompts")
    return [_ids([] if ids is None else ids) for ids in lists]


def _ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(map(_is_id, value)):
        raise RequestError(f"token_ids_logprob must be a list of token ids, got {value!r}")
    if len(value) > MAX_NAMED_IDS:
        raise RequestError(f"token_ids_logprob may have at most {MAX_NAMED_IDS} ids, got {len(value)}")
    return tuple(value)


def _is_id(value: Any) -> bool:
    return type(value) is int

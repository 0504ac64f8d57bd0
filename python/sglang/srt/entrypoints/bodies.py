"""Bodies that pydantic reads, with what is wrong of them in one line."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from sglang.srt.managers.text_request import RequestError

Body = TypeVar("Body", bound=BaseModel)


def validated(kind: type[Body], value: Any) -> Body:
    """
    Raises:
        RequestError: a field is missing or has the wrong type.
    """
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()]
        raise RequestError("; ".join(lines)) from error

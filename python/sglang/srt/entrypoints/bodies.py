"""Bodies that pydantic reads, with what is wrong of them in one line."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from sglang.srt.managers.text_request import RequestError

Kind = TypeVar("Kind", bound=BaseModel)


class Body(BaseModel):
    """Fields nobody knows are kept; null is the same as a field that is not there."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {
            name: value for name, value in given.items() if value is not None or not cls._has_default(name)
        }

    @classmethod
    def _has_default(cls, name: str) -> bool:
        """Other than None."""
        field = cls.model_fields.get(name)
        return field is not None and not field.is_required() and field.default is not None


def validated(kind: type[Kind], value: Any) -> Kind:
    """
    Raises:
        RequestError: a field is missing or has the wrong type.
    """
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()]
        raise RequestError("; ".join(lines)) from error

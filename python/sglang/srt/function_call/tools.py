"""The functions that a request offers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Tools:
    parameters: Mapping[str, Mapping[str, Any]]  # function's name -> JSON schema of its arguments

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.parameters)

    def schema(self, function: str, argument: str) -> Mapping[str, Any] | None:
        found = self.schemas(function).get(argument)
        return found if isinstance(found, Mapping) else None

    def schemas(self, function: str) -> Mapping[str, Any]:
        """Of a function's arguments, as far as the request says."""
        properties = self.parameters.get(function, {}).get("properties")
        return properties if isinstance(properties, Mapping) else {}

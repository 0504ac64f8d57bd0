"""The file that ``python -m sglang.tune_spec --save`` writes and ``--speculative-auto-table`` reads.

Costs of steps and acceptance of drafts, with the device, models and shape that they were measured with.
Text in, text out; reading the file itself is the caller's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from sglang.srt.model_executor.step_plan import SpecShape
from sglang.srt.speculative.cost_table import CostTable, CostTableError

VERSION = 1


@dataclass(frozen=True, slots=True)
class AutoTable:
    device: str
    model: str
    drafter: str
    shape: SpecShape
    table: CostTable
    acceptance: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # class -> p1, p2, …
    note: str = ""  # how it came about, for people

    def to_json(self) -> str:
        data = {
            "version": VERSION,
            "device": self.device,
            "model": self.model,
            "drafter": self.drafter,
            "shape": asdict(self.shape),
            "acceptance": {name: list(parts) for name, parts in self.acceptance.items()},
            **({"note": self.note} if self.note else {}),
            **self.table.to_dict(),
        }
        return json.dumps(data, indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> AutoTable:
        """Raises CostTableError."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise CostTableError(f"no JSON: {error}") from None
        if not isinstance(data, dict):
            raise CostTableError(
                "the file must hold one JSON object, as `python -m sglang.tune_spec` writes it"
            )
        if data.get("version") != VERSION:
            raise CostTableError(
                f"version {data.get('version')!r} is not known (this is {VERSION}): make the table anew"
            )
        names = {name: data.get(name) for name in ("device", "model", "drafter")}
        for name, value in names.items():
            if not isinstance(value, str):
                raise CostTableError(f"{name!r} must be a string, got {value!r}")
        return AutoTable(
            device=str(names["device"]),
            model=str(names["model"]),
            drafter=str(names["drafter"]),
            shape=_shape(data.get("shape")),
            table=CostTable.from_dict(data),
            acceptance=_acceptance(data.get("acceptance", {})),
            note=str(data.get("note", "")),
        )


def _shape(data: object) -> SpecShape:
    names = ("num_steps", "topk", "num_draft_tokens")
    if not isinstance(data, Mapping) or set(data) != set(names):
        raise CostTableError(f"'shape' must be an object with {', '.join(names)}, got {data!r}")
    if not all(isinstance(data[n], int) and not isinstance(data[n], bool) and data[n] >= 1 for n in names):
        raise CostTableError(f"'shape' must have integers above 0, got {data!r}")
    return SpecShape(data["num_steps"], data["topk"], data["num_draft_tokens"])


def _acceptance(data: object) -> dict[str, tuple[float, ...]]:
    if not isinstance(data, Mapping):
        raise CostTableError(f"'acceptance' must be an object of class -> [p1, p2, …], got {data!r}")
    for name, parts in data.items():
        good = isinstance(parts, list) and parts and all(_is_part(part) for part in parts)
        if not good:
            raise CostTableError(
                f"acceptance of {name!r} must be a list of numbers from 0 to 1, got {parts!r}"
            )
    return {str(name): tuple(float(part) for part in parts) for name, parts in data.items()}


def _is_part(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1

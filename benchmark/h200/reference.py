"""What a CPU in float32 puts out greedily, how near its second choice was, and what bf16 changes there."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Continuation:
    id: str
    prompt: list[int]
    output: list[int]
    margins: list[float]  # at each output: the float32 logit of the best token less that of the second
    bf16_errors: list[float]  # by how much that difference changes if the CPU computes in bf16


@dataclass(frozen=True, slots=True)
class Reference:
    model: str
    sequences: list[Continuation]

    @property
    def bf16_error(self) -> float:
        """The largest error measured: a smaller margin may be turned round by rounding."""
        return max(error for s in self.sequences for error in s.bf16_errors)

    @property
    def decisive_share(self) -> float:
        """Of all outputs, those at which a difference counts."""
        margins = [margin for s in self.sequences for margin in s.margins]
        return sum(margin > self.bf16_error for margin in margins) / len(margins)

    def cut(self, sequences: int, outputs: int) -> Reference:
        """A smaller one, for a short run."""
        kept = [
            Continuation(s.id, s.prompt, s.output[:outputs], s.margins[:outputs], s.bf16_errors[:outputs])
            for s in self.sequences[:sequences]
        ]
        return Reference(self.model, kept)


def write_reference(reference: Reference, file: Path) -> None:
    """One sequence a line, so that a change is seen in a diff."""
    lines = [json.dumps({"model": reference.model})]
    lines += [json.dumps(_rounded(asdict(sequence))) for sequence in reference.sequences]
    file.write_text("\n".join(lines) + "\n")


def read_reference(file: Path) -> Reference:
    first, *lines = file.read_text().splitlines()
    return Reference(json.loads(first)["model"], [Continuation(**json.loads(line)) for line in lines])


def _rounded(fields: dict[str, object]) -> dict[str, object]:
    return {
        name: [round(x, 4) for x in value] if name in ("margins", "bf16_errors") else value  # type: ignore[attr-defined]
        for name, value in fields.items()
    }

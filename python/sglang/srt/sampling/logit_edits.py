"""Custom logit processors at work: on the logits of their rows, before anything is chosen of them.

Numbers stay finite, so that a row that allows nothing is no broken one: what a processor forbids is as far
down as no logit is, and what it leaves broken stays so, which ends the request.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from sglang.srt.model_executor.step_plan import RowEdit, SlotAdmission
from sglang.srt.sampling.custom_logit_processor import REQUEST, ProcessorError, load_processor

LOWEST: Final = -1e30
"""In place of minus infinity: sums of a vocabulary of them are finite in float32."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProcessedRequest:
    """A request as a processor sees it, at one place of its reply."""

    rid: str
    origin_input_ids: list[int]
    output_ids: list[int]


@dataclass(frozen=True, slots=True)
class _Processor:
    call: Any
    params: dict[str, Any]
    rid: str

    def run(self, lines: torch.Tensor, params: list[dict[str, Any]]) -> torch.Tensor:
        made = self.call(lines.clone(), params)
        if not isinstance(made, torch.Tensor) or made.shape != lines.shape:
            raise TypeError(f"a logit processor must return a tensor of shape {tuple(lines.shape)}")
        return made


def _loaded(text: str) -> Any:
    """What can't be read here, though the scheduler could, fails when it is called."""
    try:
        return load_processor(text)
    except ProcessorError as error:
        message = str(error)

    def fail(logits: torch.Tensor, params: list[dict[str, Any]]) -> torch.Tensor:
        raise ProcessorError(message)

    return fail


class LogitEditors:
    """The processors of all slots."""

    def __init__(self) -> None:
        self._by_slot: dict[int, _Processor] = {}

    def admit(self, admissions: Sequence[SlotAdmission]) -> None:
        for a in admissions:
            self._by_slot.pop(a.slot, None)
            if a.processor is not None:
                params = json.loads(a.processor.params)
                self._by_slot[a.slot] = _Processor(_loaded(a.processor.text), params, a.processor.rid)

    def has_any(self, slots: Sequence[int]) -> bool:
        return bool(self._by_slot) and any(slot in self._by_slot for slot in slots)

    def apply(self, edits: Sequence[RowEdit], logits: torch.Tensor, first_lines: Mapping[int, int]) -> None:
        """logits: [T, V], changed in place; ``first_lines``: of the rows whose tokens are chosen, where their
        nodes begin.
        """
        for edit in edits:
            first = first_lines.get(edit.row)
            if first is not None:
                lines = logits[first : first + len(edit.paths)]
                lines.copy_(self._edited(edit, lines))

    def _edited(self, edit: RowEdit, lines: torch.Tensor) -> torch.Tensor:
        """[N, V] of one row -> as its processor wants them; NaN where it fails."""
        processor = self._by_slot[edit.slot]
        prompt, outputs = list(edit.ids[: edit.prompt_len]), list(edit.ids[edit.prompt_len :])
        params = [
            {**processor.params, REQUEST: ProcessedRequest(processor.rid, prompt, [*outputs, *path])}
            for path in edit.paths
        ]
        try:
            made = processor.run(lines, params)
        except Exception:
            # Perhaps at a node that never comes to be: the others are as good as in a step of their own.
            made = torch.cat([_alone(processor, lines[i : i + 1], params[i]) for i in range(len(lines))])
        return made.to(lines).clamp(LOWEST, -LOWEST)  # NaN stays


def _alone(processor: _Processor, line: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
    """[1, V]"""
    try:
        return processor.run(line, [params]).to(line)
    except Exception:  # of a stranger's code: it ends its own request, and the log says why
        logger.exception("the custom logit processor of request %s failed", processor.rid)
        return torch.full_like(line, torch.nan)

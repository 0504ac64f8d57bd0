"""What rows tell beside their ids, once it is on the host."""

from __future__ import annotations

from collections.abc import Sequence

from sglang.srt.model_executor.reporting import DeviceReport
from sglang.srt.model_executor.step_plan import Logprobs, RowReport, RowWish, StepPlan, Vectors

_NONE = Logprobs()


def read_reports(plan: StepPlan, report: DeviceReport, num_tokens: Sequence[int]) -> tuple[RowReport, ...]:
    """Of tensors on the host; ``num_tokens``: that each row put out."""
    lines, vectors, columns = _Lines(report), _VectorReader(report), report.num_columns
    chosen = [
        lines.take(wish, columns, num_tokens[wish.row]) if wish.logprobs else _NONE for wish in plan.wishes
    ]
    prompts = [lines.take(wish, wish.num_prompt, wish.num_prompt) for wish in plan.wishes]
    hidden = []
    for wish in plan.wishes:
        count = used = 0
        if wish.hidden_from is not None and wish.row < len(plan.decode_slots):
            count, used = columns, num_tokens[wish.row]
        elif wish.hidden_from is not None:
            chunk = plan.prefill[wish.row - len(plan.decode_slots)]
            count = used = len(chunk.token_ids) - wish.hidden_from
        hidden.append(vectors.take(count, used))
    rows = [wish.row for wish in plan.wishes]
    return tuple(map(RowReport, rows, chosen, prompts, hidden))


class _Lines:
    """Taken from the front."""

    def __init__(self, report: DeviceReport) -> None:
        self._num_top = report.num_top
        self._values = [] if report.values is None else report.values.tolist()
        self._top_ids = [] if report.top_ids is None else report.top_ids.tolist()
        self._at = 0

    def take(self, wish: RowWish, count: int, used: int) -> Logprobs:
        """The next ``count`` lines, of which ``used`` mean something."""
        if not count:
            return _NONE
        values = self._values[self._at : self._at + used]
        top_ids = self._top_ids[self._at : self._at + used]
        self._at += count
        top_end, named = 1 + wish.num_top, 1 + self._num_top
        named_end = named + len(wish.token_ids)
        return Logprobs(
            own=tuple(line[0] for line in values),
            top=tuple(tuple(line[1:top_end]) for line in values) if wish.num_top else (),
            top_ids=tuple(tuple(ids[: wish.num_top]) for ids in top_ids) if wish.num_top else (),
            named=tuple(tuple(line[named:named_end]) for line in values) if wish.token_ids else (),
        )


class _VectorReader:
    def __init__(self, report: DeviceReport) -> None:
        self._vectors = None if report.hidden is None else report.hidden.numpy()
        self._at = 0

    def take(self, count: int, used: int) -> Vectors:
        if not count or self._vectors is None:
            return Vectors()
        vectors = self._vectors[self._at : self._at + used]
        self._at += count
        return Vectors(vectors.tobytes(), vectors.shape[1], vectors.dtype.char)

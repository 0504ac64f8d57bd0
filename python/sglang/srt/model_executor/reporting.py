"""What rows tell beside their ids: log-probabilities and hidden states. Launched behind a step of which a row
wishes it, on the step's stream; no step is different for it, a recorded one least of all.

Log-probabilities are ``log_softmax`` of the logits as a row's ids were chosen from them: penalties, biases,
masks and its temperature are in them, filters are not. Those of a prompt are of the model's own logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch

from sglang.srt.model_executor.step_plan import RowWish, StepPlan
from sglang.srt.model_executor.step_trace import StepTrace
from sglang.srt.utils.upload import upload

PART_NUMBERS = 4 << 20
"""Logits, and numbers of hidden states, that are looked at at a time: there is not much memory to spare
beside a running server's."""

_LOWEST = torch.finfo(torch.float32).min


class Head(Protocol):
    """What this asks of a model."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...

    def last_norm(self, hidden: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """All rows' in one: first the lines of what was chosen, C for each row that wants them, then prompts'."""

    values: torch.Tensor | None  # [lines, 1 + top + named]: of the own id, the likeliest, the named
    top_ids: torch.Tensor | None  # [lines, top] int64
    num_top: int
    num_columns: int  # C
    hidden: torch.Tensor | None  # [vectors, H], C for each row without a chunk; on its way to the host

    def to_host(self, pin: bool) -> DeviceReport:
        """On its way there; there when the stream has come so far."""

        def arrive(values: torch.Tensor | None) -> torch.Tensor | None:
            if values is None:
                return None
            room = torch.empty(values.shape, dtype=values.dtype, pin_memory=pin)
            return room.copy_(values, non_blocking=True)

        return DeviceReport(
            arrive(self.values), arrive(self.top_ids), self.num_top, self.num_columns, self.hidden
        )


class Reporter:
    def __init__(self, head: Head, vocab_size: int) -> None:
        self._head = head
        self._lines_at_once = max(1, PART_NUMBERS // vocab_size)

    def report(self, plan: StepPlan, trace: StepTrace) -> DeviceReport:
        num_top = max(wish.num_top for wish in plan.wishes)
        parts = [*self._chosen(plan, trace, num_top), *self._prompts(plan, trace, num_top)]
        columns = trace.tokens.shape[1]
        hidden = self._hidden(plan, trace)
        if not parts:
            return DeviceReport(None, None, num_top, columns, hidden)
        values, top_ids = (torch.cat(of_parts) for of_parts in zip(*parts, strict=True))
        return DeviceReport(values, top_ids, num_top, columns, hidden)

    def _chosen(self, plan: StepPlan, trace: StepTrace, num_top: int) -> Iterator[_Values]:
        wishes = [wish for wish in plan.wishes if wish.logprobs]
        if not wishes:
            return
        assert trace.logits is not None, "logprobs of what was chosen, and no row chose"
        device, columns = trace.logits.device, trace.tokens.shape[1]
        rows = upload([wish.row for wish in wishes], torch.int64, device)  # [W]
        lines = trace.lines(rows).flatten()  # [W * C]
        own = trace.tokens[rows].flatten()
        heat = upload([wish.temperature for wish in wishes], trace.logits.dtype, device)
        heat = heat.repeat_interleave(columns)[:, None]
        named = _named(plan.wishes, wishes, [columns] * len(wishes), device)
        for part in self._parts(len(lines)):
            logits = trace.logits[lines[part]] / heat[part]
            yield _look_up(logits, own[part], named[part], num_top)

    def _prompts(self, plan: StepPlan, trace: StepTrace, num_top: int) -> Iterator[_Values]:
        wishes = [wish for wish in plan.wishes if wish.num_prompt]
        if not wishes:
            return
        device = trace.hidden.device
        begins, places, own = _chunk_begins(plan), list[int](), list[int]()
        for wish in wishes:
            chunk = plan.prefill[wish.row - len(plan.decode_slots)]
            begin = begins[wish.row - len(plan.decode_slots)]
            places += range(begin + wish.prompt_from, begin + wish.prompt_to)
            following = chunk.token_ids[wish.prompt_from + 1 : wish.prompt_to + 1]
            own += following
            if len(following) < wish.num_prompt:
                assert chunk.next_id is not None, "nothing known follows a prompt's last token"
                own.append(chunk.next_id)
        where, ids = upload(places, torch.int64, device), upload(own, torch.int64, device)
        named = _named(plan.wishes, wishes, [wish.num_prompt for wish in wishes], device)
        for part in self._parts(len(places)):
            logits = self._head.logits(trace.hidden[where[part]])
            yield _look_up(logits, ids[part], named[part], num_top)

    def _hidden(self, plan: StepPlan, trace: StepTrace) -> torch.Tensor | None:
        """[vectors, H] float32, or float64 of a float64 model; on the host when the stream has come so far.
        What the device holds is a part: a long prompt's would be gigabytes.
        """
        wishes = [wish for wish in plan.wishes if wish.hidden_from is not None]
        if not wishes:
            return None
        device, num_decode = trace.hidden.device, len(plan.decode_slots)
        begins, places = _chunk_begins(plan), list[torch.Tensor]()
        for wish in wishes:
            if wish.row < num_decode:
                places.append(trace.places(upload([wish.row], torch.int64, device)).flatten())
                continue
            assert wish.hidden_from is not None
            at = wish.row - num_decode
            end = begins[at] + len(plan.prefill[at].token_ids)
            places.append(torch.arange(begins[at] + wish.hidden_from, end, device=device))
        where, (_, size) = torch.cat(places), trace.hidden.shape
        dtype = torch.float64 if trace.hidden.dtype == torch.float64 else torch.float32
        room = torch.empty((len(where), size), dtype=dtype, pin_memory=device.type == "cuda")
        for part in _parts(len(where), max(1, PART_NUMBERS // size)):
            normed = self._head.last_norm(trace.hidden[where[part]])
            room[part].copy_(normed.to(dtype), non_blocking=True)
        return room

    def _parts(self, num_lines: int) -> Iterator[slice]:
        return _parts(num_lines, self._lines_at_once)


_Values = tuple[torch.Tensor, torch.Tensor]


def _parts(count: int, at_once: int) -> Iterator[slice]:
    for first in range(0, count, at_once):
        yield slice(first, first + at_once)


def _chunk_begins(plan: StepPlan) -> list[int]:
    """Where among a step's tokens its chunks begin: behind one of each decode row."""
    return list(accumulate((len(c.token_ids) for c in plan.prefill), initial=len(plan.decode_slots)))


def _named(
    of_plan: Sequence[RowWish], wishes: Sequence[RowWish], counts: Sequence[int], device: torch.device
) -> torch.Tensor:
    """[lines, most ids of any wish] int64: the ids named, again for each of a wish's ``counts`` lines."""
    width = max(len(wish.token_ids) for wish in of_plan)
    padded = [[*wish.token_ids, *[0] * (width - len(wish.token_ids))] for wish in wishes]
    ids = upload(padded, torch.int64, device).view(len(wishes), width)
    return ids.repeat_interleave(upload(counts, torch.int64, device), dim=0, output_size=sum(counts))


def _look_up(logits: torch.Tensor, own: torch.Tensor, named: torch.Tensor, num_top: int) -> _Values:
    """logits: [L, V]; own: [L]; named: [L, M] -> values [L, 1 + top + M], ids of the likeliest [L, top]."""
    logprobs = logits.log_softmax(dim=-1)
    top = logprobs.topk(num_top, dim=-1)
    values = torch.cat([logprobs.gather(1, own[:, None]), top.values, logprobs.gather(1, named)], dim=1)
    return values.clamp_(min=_LOWEST), top.indices

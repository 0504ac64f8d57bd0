"""Decode along given outputs, and go on after each difference as if it had not been."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang.bench_one_batch_cases import OneBatch, places_needed
from sglang.srt.model_executor.executor import Executor

Ids = Sequence[int]


@dataclass(frozen=True, slots=True)
class Difference:
    sequence: int
    position: int  # index of the output
    wanted: int
    got: int


def generate(
    executor: Executor, prompts: Sequence[Ids], output_len: int, draft_lens: Sequence[int], rows: int
) -> list[list[int]]:
    """Greedy outputs, ``rows`` prompts at a time."""
    outputs: list[list[int]] = []
    for first in range(0, len(prompts), rows):
        part = prompts[first : first + rows]
        # Rows that are only there to keep the batch's shape.
        filled = [*part, *[prompts[0]] * (rows - len(part))]
        batch = OneBatch(executor, filled, places_needed(executor, max(map(len, filled)), output_len))
        batch.prefill()
        batch.decode_all(draft_lens, output_len)
        outputs += [output[:output_len] for output in batch.outputs()[: len(part)]]
    return outputs


def follow(
    executor: Executor,
    prompts: Sequence[Ids],
    outputs: Sequence[Ids],
    draft_lens: Sequence[int],
    rows: int,
) -> list[Difference]:
    """Every position at which the executor, given all that is before it, puts out something else.

    A sequence that differs is begun anew behind the difference, so all positions are compared. All
    batches have ``rows`` rows, which all run as long as the longest.
    """
    left = [(index, 0) for index in range(len(prompts))]  # sequence, first position to compare
    found: list[Difference] = []
    while left:
        # Of about equal length, so that no row runs long for nothing.
        left.sort(key=lambda item: item[1] - len(outputs[item[0]]))
        part, left = left[:rows], left[rows:]
        begins = [[*prompts[index], *outputs[index][:at]] for index, at in part]
        longest = max(len(outputs[index]) - at for index, at in part)
        got = generate(executor, begins, longest, draft_lens, rows)
        for (index, at), ids in zip(part, got, strict=True):
            first = _first_difference(outputs[index][at:], ids)
            if first is None:
                continue
            position = at + first
            found.append(Difference(index, position, outputs[index][position], ids[first]))
            if position + 1 < len(outputs[index]):
                left.append((index, position + 1))
    return sorted(found, key=lambda d: (d.sequence, d.position))


def _first_difference(wanted: Ids, got: Ids) -> int | None:
    """``got`` may be longer."""
    return next((i for i, token in enumerate(wanted) if token != got[i]), None)

"""The verdicts of the load and soak tests: what grows or drifts is seen. Run alone: pytest THIS_FILE"""

from __future__ import annotations

import math
import os
import sys
import time
from pathlib import Path

from hypothesis import assume, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmark" / "endurance"))

from acceptance import Answer, compare
from footprint import MEMORY_BYTES, Footprint, ProcessUse, growth, look


def samples(bytes_a_second: float, descriptors_a_minute: float) -> list[Footprint]:
    return [
        Footprint(
            at,
            {"http": ProcessUse(int(1e8 + bytes_a_second * at), int(20 + descriptors_a_minute * at / 60), 3)},
        )
        for at in range(0, 600, 5)
    ]


@settings(max_examples=40)
@given(st.floats(-1e5, 1e6), st.floats(0, 30))
def test_growth_is_seen_and_nothing_else(memory: float, descriptors: float) -> None:
    between = 600 - 150 - 5  # seconds from the middle of the first window to that of the last
    allowed = (1e8 * 0.03 + MEMORY_BYTES) / between
    assume(abs(memory / allowed - 1) > 0.1 and abs(descriptors - 4 * 60 / between) > 0.3)
    _, grown = growth(samples(memory, descriptors), 150)
    assert any("memory" in line for line in grown) == (memory > allowed)
    assert any("descriptors" in line for line in grown) == (descriptors * between / 60 > 4)


def test_a_process_is_looked_at() -> None:
    found = look(os.getpid(), time.monotonic())
    use = found.processes["http"]
    assert use.resident_bytes > MEMORY_BYTES and use.descriptors > 2 and use.threads >= 1


@settings(max_examples=40)
@given(st.floats(0.9, 1.1), st.integers(1, 5))
def test_drift_is_told_prompt_by_prompt(change: float, more: int) -> None:
    """Another mix of prompts in the two windows is no drift."""
    assume(abs(abs(change - 1) - 0.02) > 1e-3)
    answers = []
    for number in range(6):
        emitted = 10_000 * (1 + number)
        answers.append(Answer(f"p{number}", 10.0, emitted, 10_000))
        answers += [Answer(f"p{number}", 590.0, round(emitted * change), 10_000)] * (more if number else 1)
    drift = compare(answers, 300)
    assert drift.prompts == 6 and math.isclose(drift.change, change - 1, abs_tol=1e-3)
    assert drift.is_more_than(0.02, by_chance_too=False) == (abs(change - 1) > 0.02)


def test_nothing_to_compare_is_no_success() -> None:
    assert compare([], 300).is_more_than(0.02, by_chance_too=True)
    apart = [Answer("a", 0.0, 20, 10), Answer("b", 600.0, 20, 10)]
    assert compare(apart, 300).is_more_than(0.02, by_chance_too=True)


@settings(max_examples=40)
@given(st.lists(st.floats(-0.5, 0.5), min_size=3, max_size=3))
def test_what_chance_makes_is_no_drift_of_a_short_run(noise: list[float]) -> None:
    mean = sum(noise) / 3
    assume(abs(mean) > 0.021)
    answers = [Answer(f"p{i}", 0.0, 100_000, 50_000) for i in range(3)]
    answers += [Answer(f"p{i}", 600.0, round(100_000 * (1 + noise[i])), 50_000) for i in range(3)]
    drift = compare(answers, 300)
    assert drift.is_more_than(0.02, by_chance_too=False)
    assert drift.is_more_than(0.02, by_chance_too=True) == (abs(drift.change) > max(0.02, 1.96 * drift.error))

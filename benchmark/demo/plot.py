"""The demo's picture: load, speed and mode over the same time axis."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmark.demo.monitor import IDLE, PLAIN, SPEC, Sample

_COLOURS: Final = {PLAIN: "#d9822b", SPEC: "#2a7f9e", IDLE: "#cccccc"}
_LABELS: Final = {PLAIN: "plain", SPEC: "speculative"}
_INK: Final = "#333333"
_NARROW_S: Final = 4.0
"""Stretches shorter than this get no label in the picture."""


def draw(samples: Sequence[Sample], path: Path, model: str) -> None:
    """Write the picture of the samples to ``path``."""
    figure, (load, speed, mode) = plt.subplots(
        3, 1, figsize=(9, 6.2), sharex=True, height_ratios=[3, 3, 2.2], layout="constrained"
    )
    _draw_load(load, samples)
    _draw_speed(speed, samples)
    _draw_mode(mode, samples)
    load.set_title(f"{model}: the mode of each decode step follows the load", loc="left", fontsize=12)
    idle = any(sample.mode == IDLE for sample in samples)
    mode.set_xlabel("seconds (grey: prefill, no decode step)" if idle else "seconds")
    mode.set_xlim(0, samples[-1].seconds)
    for axes in (load, speed, mode):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, facecolor="white")
    plt.close(figure)


def _draw_load(axes: Any, samples: Sequence[Sample]) -> None:
    seconds = [sample.seconds for sample in samples]
    running = [sample.running for sample in samples]
    _shade(axes, samples)
    axes.fill_between(seconds, running, step="post", color=_INK, alpha=0.12, linewidth=0)
    axes.step(seconds, running, where="post", color=_INK, linewidth=1.6)
    threshold = samples[-1].threshold
    if isinstance(threshold, int):
        axes.axhline(threshold + 0.5, color="#b03a2e", linestyle="--", linewidth=1.2)
        axes.annotate(
            f"threshold: more than {threshold} running → plain", (0.01, threshold + 0.5),
            xycoords=("axes fraction", "data"), xytext=(0, 3), textcoords="offset points",
            color="#b03a2e", fontsize=9,
        )  # fmt: skip
    axes.set_ylim(0, max(running) * 1.15 + 1)
    axes.set_ylabel("running requests")


def _draw_speed(axes: Any, samples: Sequence[Sample]) -> None:
    _shade(axes, samples)
    rates = [sample.tokens_per_second for sample in samples]
    axes.plot([sample.seconds for sample in samples], rates, color=_INK, linewidth=1.6)
    axes.set_ylim(0, max(rates) * 1.15 + 1)
    axes.set_ylabel("tokens / s (all streams)")
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)


def _draw_mode(axes: Any, samples: Sequence[Sample]) -> None:
    """Colour the strip by mode, and draw the tokens that one step gives one request over it."""
    for begin, end, mode in _stretches(samples):
        axes.axvspan(begin, end, color=_COLOURS[mode], alpha=0.85, linewidth=0)
        if end - begin >= _NARROW_S and mode in _LABELS:
            axes.text((begin + end) / 2, 0.3, _LABELS[mode], color="white", ha="center", fontsize=9.5)
    known = [sample for sample in samples if sample.accept_length is not None]
    lengths = [sample.accept_length or 0.0 for sample in known]
    axes.plot([sample.seconds for sample in known], lengths, color="white", linewidth=3.4)
    axes.plot([sample.seconds for sample in known], lengths, color=_INK, linewidth=1.6)
    axes.set_ylim(0, max([4.0, *lengths]) * 1.05)
    axes.set_yticks([1, 2, 3, 4])
    axes.set_ylabel("mode, and\ntokens a step")


def _shade(axes: Any, samples: Sequence[Sample]) -> None:
    for begin, end, mode in _stretches(samples):
        axes.axvspan(begin, end, color=_COLOURS[mode], alpha=0.12, linewidth=0)


def _stretches(samples: Sequence[Sample]) -> Iterator[tuple[float, float, str]]:
    """Yield (begin, end, mode) of the stretches of one mode; a sample tells of the time before it."""
    begin = 0.0
    for mode, group in groupby(samples, key=lambda sample: sample.mode):
        end = list(group)[-1].seconds
        yield begin, end, mode
        begin = end

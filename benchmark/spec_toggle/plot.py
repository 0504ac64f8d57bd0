"""Draw the toggle benchmark: tokens per second by number of streams, and the ratios below."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmark.spec_toggle.records import PLAIN, SPEC, TOGGLE
from benchmark.spec_toggle.report import DRAFTER_COST, TOGGLE_OF_BEST, Row
from benchmark.spec_toggle.stats import Estimate

PLAIN_COLOUR: Final = "#d9822b"
SPEC_COLOUR: Final = "#2a7f9e"
TOGGLE_COLOUR: Final = "#333333"
_GREY: Final = "#8a8a8a"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write the plot of the rows to ``path``."""
    figure, (rates, ratios) = plt.subplots(
        2, 1, figsize=(8, 6.4), sharex=True, height_ratios=[3, 2], layout="constrained"
    )
    _draw_rates(rates, rows)
    _draw_ratios(ratios, rows)
    ratios.set_xscale("log", base=2)
    ratios.set_xticks([row.streams for row in rows], [str(row.streams) for row in rows])
    ratios.set_xlabel("concurrent streams")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_rates(axes: Any, rows: Sequence[Row]) -> None:
    styles = (
        (PLAIN, "plain decode (no drafter)", PLAIN_COLOUR, "-o"),
        (SPEC, "speculation always", SPEC_COLOUR, "-s"),
        (TOGGLE, "toggle", TOGGLE_COLOUR, "--D"),
    )
    for mode, label, colour, style in styles:
        _curve(axes, rows, [row.decode[mode] for row in rows], label, colour, style)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("decode rate, tok/s")
    axes.set_title("One server, both modes: medians and 95 % intervals", loc="left", fontsize=11)
    _tidy(axes)


def _draw_ratios(axes: Any, rows: Sequence[Row]) -> None:
    gain = [row.spec_over_plain for row in rows]
    _curve(axes, rows, gain, "speculation / plain (no drafter)", SPEC_COLOUR, "-s")
    _curve(axes, rows, [row.toggle_over_best for row in rows], "toggle / better mode", TOGGLE_COLOUR, "--D")
    cost = [row.drafter_cost for row in rows]
    _curve(axes, rows, cost, "plain step's time with / without drafter", _GREY, ":^")
    axes.axhline(1.0, color=_GREY, linewidth=0.8)
    axes.axhspan(TOGGLE_OF_BEST, DRAFTER_COST, color=_GREY, alpha=0.15, linewidth=0)
    axes.set_ylabel("ratio")
    _tidy(axes)


def _curve(
    axes: Any, rows: Sequence[Row], estimates: Sequence[Estimate], label: str, colour: str, style: str
) -> None:
    streams = [row.streams for row in rows]
    values = [estimate.value for estimate in estimates]
    below = [max(0.0, estimate.value - estimate.low) for estimate in estimates]
    above = [max(0.0, estimate.high - estimate.value) for estimate in estimates]
    look = {"fmt": style, "color": colour, "markersize": 4.5, "capsize": 2.5}
    axes.errorbar(streams, values, yerr=[below, above], label=label, **look)


def _tidy(axes: Any) -> None:
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)

"""The demo's live table: one row for each plateau, the running one kept up to date."""

from collections.abc import Sequence
from typing import Final

from rich.table import Table
from rich.text import Text

from benchmark.demo.monitor import IDLE, PLAIN, SPEC, Plateau

_STYLES: Final = {PLAIN: "bold yellow", SPEC: "bold cyan", IDLE: "dim"}
_BAR_WIDTH: Final = 24


def live_table(plateaus: Sequence[Plateau], threshold: int | str | None) -> Table:
    """Build the table of everything so far."""
    table = Table(title=_title(threshold), title_justify="left")
    for name in ("time", "streams", "running", "mode", "accept length", "tok/s"):
        table.add_column(name, justify="right")
    table.add_column("", min_width=_BAR_WIDTH)
    highest = max((plateau.rate() for plateau in plateaus), default=0.0)
    for plateau in plateaus:
        table.add_row(*_cells(plateau), _bar(plateau, highest))
    return table


def plateau_line(plateau: Plateau) -> str:
    """Return one plain line about a finished plateau, for output that is no terminal."""
    time, streams, running, mode, length, rate = (str(cell) for cell in _cells(plateau))
    load = f"{streams:>2} streams, {running:>2} running"
    return f"{time:>9}  {load}  {mode:10}  accept length {length}  {rate:>6} tok/s"


def _title(threshold: int | str | None) -> str:
    if threshold is None:
        return "speculative decoding, no threshold"
    if threshold == "auto":
        return "speculation chosen by measured cost"
    return f"speculation up to {threshold} running requests, plain decode beyond"


def _cells(plateau: Plateau) -> list[str | Text]:
    mode, length = plateau.mode(), plateau.accept_length()
    drafts = max((sample.draft_len for sample in plateau.settled if sample.mode == SPEC), default=0)
    label = f"spec(k={drafts})" if mode == SPEC else mode
    return [
        f"{plateau.begin:.0f}-{plateau.end:.0f} s",
        str(plateau.streams),
        str(plateau.running()),
        Text(label, style=_STYLES[mode]),
        "-" if length is None else f"{length:.2f}",
        f"{plateau.rate():.1f}",
    ]


def _bar(plateau: Plateau, highest: float) -> Text:
    share = plateau.rate() / highest if highest else 0.0
    return Text("█" * round(share * _BAR_WIDTH), style=_STYLES[plateau.mode()])

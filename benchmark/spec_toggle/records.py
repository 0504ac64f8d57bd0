"""The raw result of one run of the toggle benchmark, and the file of them (JSON lines)."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

PLAIN: Final = "plain"
SPEC: Final = "spec"
TOGGLE: Final = "toggle"
PLAIN_WITH_DRAFTER: Final = "plain+drafter"
MODES: Final = (PLAIN, SPEC, TOGGLE, PLAIN_WITH_DRAFTER)


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One mode driven once with a fixed number of tokens at one number of streams."""

    mode: str
    streams: int
    round: int
    position: int  # place among the modes at this point of the round (the order is shuffled)
    decode_rate: float  # tok/s while all streams decode
    total_rate: float  # tok/s with prefill, ramp and tail
    decode_tokens: float
    decode_seconds: float
    total_tokens: int
    total_seconds: float
    spec_tokens: float  # emitted by speculative steps
    spec_steps: int  # speculative steps, one a request a step
    steps_plain: int  # decode steps of each mode, one a request a step
    steps_spec: int
    prompt_ids: tuple[str, ...]
    text_hashes: tuple[str, ...]  # of the output ids, one a prompt


@dataclass(frozen=True, slots=True)
class BenchRun:
    """A whole run of the benchmark: what was run on what, and every record."""

    header: dict[str, Any]
    records: tuple[RunRecord, ...]


def write_header(path: Path, header: dict[str, Any]) -> None:
    """Begin the file with the run's description."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"header": header}) + "\n", encoding="utf-8")


def append_record(path: Path, record: Any) -> None:
    """Add one record (a dataclass), at once, so that an interrupted run keeps what it measured."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(record)) + "\n")


def read_run(path: Path) -> BenchRun:
    """Read what `write_header` and `append_record` wrote."""
    header, lines = read_lines(path)
    return BenchRun(header, tuple(_record(line) for line in lines))


def read_lines(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the header and the records' fields of a file.

    Raises:
        ValueError: the file doesn't begin with a header.
    """
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines or "header" not in lines[0]:
        raise ValueError(f"{path} is no file of this benchmark: its first line has no header")
    return lines[0]["header"], lines[1:]


def same_texts(records: Iterable[RunRecord]) -> tuple[int, int]:
    """Return (requests whose output ids are the same in every mode, requests)."""
    texts: dict[tuple[int, int, int], set[str]] = {}
    for record in records:
        for index, digest in enumerate(record.text_hashes):
            texts.setdefault((record.streams, record.round, index), set()).add(digest)
    return sum(len(digests) == 1 for digests in texts.values()), len(texts)


def _record(line: dict[str, Any]) -> RunRecord:
    lists = {name: tuple(line[name]) for name in ("prompt_ids", "text_hashes")}
    return RunRecord(**{**line, **lists})

"""Every test that docs/known_faults.md names is there. Run alone: pytest THIS_FILE"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
NAMED = re.compile(r"`((?:unit|registered)/[\w/]+\.py)(?:::(\w+))?`")


def missing(text: str) -> set[str]:
    """Named, and not there."""
    found = set()
    for path, name in NAMED.findall(text):
        file = ROOT / "test" / path
        if not file.is_file() or (name and f"def {name}(" not in file.read_text()):
            found.add(f"{path}::{name}")
    return found


def test_every_test_of_the_document_exists() -> None:
    text = (ROOT / "docs" / "known_faults.md").read_text()
    assert missing(text) == set()
    rows = [
        line
        for line in text.split("\n")
        if line.startswith("| ") and not re.match(r"\| (reports|kind) ", line)
    ]
    assert len(rows) >= 45
    assert all(NAMED.search(row) or "the same" in row for row in rows), rows


def test_the_check_can_fail() -> None:
    assert missing("`unit/project/test_paths.py::test_no_such_thing` `unit/no_such_file.py`") == {
        "unit/project/test_paths.py::test_no_such_thing",
        "unit/no_such_file.py::",
    }

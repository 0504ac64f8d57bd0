"""Nothing in the project names one machine's paths. Run alone: pytest test/unit/project/test_paths.py"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
TEXT = {".py", ".md", ".toml", ".txt", ".cfg", ".yml", ".yaml", ".json", ".sh", ""}
FORBIDDEN = re.compile(r"(?<![\w.])/(work|root|farm)/[\w.]")


def test_no_machine_paths() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    hits = []
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.suffix not in TEXT or path == Path(__file__).resolve() or not path.is_file():
            continue
        hits += [f"{name}: {m.group(0)}" for m in FORBIDDEN.finditer(path.read_text(errors="replace"))]
    assert hits == []

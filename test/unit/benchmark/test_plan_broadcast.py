"""The benchmark of the way from the scheduler to the ranks, with two of them. Run alone: pytest THIS_FILE"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_every_plan_is_timed() -> None:
    script = ROOT / "benchmark" / "plan_broadcast" / "plan_broadcast.py"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    command = [sys.executable, str(script), "--ranks", "2", "--rounds", "3"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = done.stdout.strip().splitlines()[2:]
    assert len(rows) == 4 and all(row.startswith("| 2 | ") and "µs" in row for row in rows)

"""schemathesis for half a minute (`make fuzz-api`: ten). Run alone: pytest THIS_FILE -m long"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.server import write_tiny_pair

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("schemathesis") is None, reason="no schemathesis: make fuzz-api")
def test_no_request_makes_the_server_fail(tmp_path: Path) -> None:
    model, _ = write_tiny_pair(tmp_path)
    command = [sys.executable, "scripts/fuzz_api.py", "--seconds", "30", "--model-path", str(model)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-6000:]
    assert "✅ Coverage" in run.stdout or "✅ Fuzzing" in run.stdout

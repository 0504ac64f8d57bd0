"""The server's own process and the detokenizer start without torch. Run alone: pytest THIS_FILE"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.server import server_environment

HEAVY = ("torch", "transformers", "prometheus_client")


@pytest.mark.parametrize(
    "module",
    [
        "sglang",
        "sglang.launch_server",
        "sglang.srt.entrypoints.engine",
        "sglang.srt.managers.detokenizer_manager",
        "sglang.srt.managers.scheduler_process",
    ],
)
def test_nothing_heavy_is_imported(module: str, tmp_path: Path) -> None:
    """torch takes seconds; prometheus_client must not come before its folder is named."""
    code = f"import sys, {module}; print(*[name for name in {HEAVY} if name in sys.modules])"
    env = server_environment(tmp_path)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert done.stdout.split() == []

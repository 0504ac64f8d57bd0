"""How upstream's client is started: its Python may have a relative path. Run alone: pytest THIS_FILE"""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmark.upstream_client import upstream_bench

CLIENT = """#!/bin/sh
while [ "$1" != --output-file ]; do shift; done
echo '{"completed": 12, "total_output_tokens": 384, "accept_length": 2.5, "server_info": {"a": 1}}' > "$2"
"""


def test_an_environment_named_by_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "env" / "python"
    python.parent.mkdir()
    python.write_text(CLIENT)
    python.chmod(0o755)
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["upstream_bench.py", "--python", "env/python"])
    monkeypatch.setattr("urllib.request.urlopen", lambda url: io.BytesIO(b'{"tokenizer_path": "t"}'))
    options = upstream_bench._options()
    run = upstream_bench._run("sglang", "random", tmp_path / "data" / "sharegpt.json", "http://x", options)
    assert run["exit_code"] == 0 and list(upstream_bench._faults(run, options)) == []
    assert "| sglang | random | 12 |" in upstream_bench._table([run], options)
    run["completed"] = 11
    assert "completed is 11, not 12" in " ".join(upstream_bench._faults(run, options))

"""The set-up's choice of an interpreter, and what it says where there is none that will do."""

import shutil
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "find_python.sh"


def _find(search_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    shell = shutil.which("sh")
    assert shell is not None
    command = [shell, str(SCRIPT), *arguments]
    return subprocess.run(
        command, env={"PATH": str(search_path)}, capture_output=True, text=True, check=False
    )


def _program(path: Path, body: str) -> Path:
    path.write_text(f"#!{shutil.which('sh')}\n{body}\n")
    path.chmod(0o755)
    return path


def test_first_that_works_is_taken(tmp_path: Path) -> None:
    _program(tmp_path / "python3", "exit 127")  # a launcher whose interpreter is not installed
    good = _program(tmp_path / "python3.11", f'exec "{sys.executable}" "$@"')
    found = _find(tmp_path)
    assert (found.returncode, found.stdout.strip()) == (0, str(good))


def test_named_interpreter_is_tried_alone(tmp_path: Path) -> None:
    _program(tmp_path / "python3", f'exec "{sys.executable}" "$@"')
    missing = _find(tmp_path, "python3.99")
    assert missing.returncode == 1
    assert "tried: python3.99" in missing.stderr and "make PYTHON=" in missing.stderr


def test_none_is_one_line(tmp_path: Path) -> None:
    found = _find(tmp_path)
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr.startswith("error: found no Python") and found.stderr.count("\n") == 1


def test_missing_ensurepip_is_said(tmp_path: Path) -> None:
    body = f'case "$2" in *ensurepip*) exit 1;; esac; exec "{sys.executable}" "$@"'
    found = _find(tmp_path, str(_program(tmp_path / "python3", body)))
    assert found.returncode == 1
    assert "ensurepip" in found.stderr and "python3-venv" in found.stderr

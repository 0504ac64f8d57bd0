"""Starting is refused beside upstream's distribution, which provides the same import package."""

from pathlib import Path

import pytest

from sglang.launch_server import main
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.entrypoints.prepare import StartError
from sglang.srt.utils.installation import upstream_conflict


def _install(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    info = folder / f"{name.replace('-', '_')}-0.5.23.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.5.23\n")
    monkeypatch.syspath_prepend(str(folder))


def test_passes_where_upstream_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(tmp_path, "sglang-toggle", monkeypatch)
    assert upstream_conflict() == ""


def test_refuses_where_upstream_is_present(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _install(tmp_path, "sglang", monkeypatch)
    with pytest.raises(SystemExit) as stopped:
        main(["--port", "0"])
    assert stopped.value.code == 1
    error = capsys.readouterr().err
    assert "sglang 0.5.23 is installed" in error and "pip uninstall sglang" in error
    assert error.count("\n") == 1
    with pytest.raises(StartError, match="sglang 0.5.23 is installed"):
        Engine()

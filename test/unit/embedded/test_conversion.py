"""Conversion happens once, whole or not at all, whoever asks and whatever was left behind."""

import json
import threading
from pathlib import Path

import pytest
import safetensors
from unit.embedded.conftest import Conversion

from sglang.embedded import convert
from sglang.embedded.cache import cache_root, publish_folder
from sglang.embedded.convert import WRITTEN_FILES, conversion_id, convert_gguf, ensure_converted
from sglang.embedded.gguf_source import EmbeddedModelError, find_gguf_file


def _fill(folder: Path) -> None:
    for name in WRITTEN_FILES:
        (folder / name).write_text("x")


@pytest.fixture
def cheap_conversion(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """Replace the conversion itself; the list collects the folders it was asked to fill."""
    calls: list[Path] = []

    def fill(source: Path, folder: Path) -> None:
        calls.append(folder)
        _fill(folder)

    monkeypatch.setattr(convert, "convert_gguf", fill)
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path / "cache"))
    return calls


def test_two_processes_convert_once(conversion: Conversion) -> None:
    assert sum("converted 272/272" in log for log in conversion.logs) == 1
    assert conversion.outputs[0] == conversion.outputs[1]
    assert str(conversion.folder) in conversion.outputs[0]
    assert sorted(path.name for path in conversion.folder.iterdir()) == sorted(WRITTEN_FILES)
    assert sorted(path.name for path in conversion.folder.parent.iterdir()) == [
        ".lock",
        conversion.folder.name,
    ]


def test_generation_ends_at_the_turns_end(conversion: Conversion) -> None:
    generation = json.loads((conversion.folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 2


def test_threads_convert_once(cheap_conversion: list[Path]) -> None:
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(ensure_converted("m"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(cheap_conversion) == 1
    assert len(set(folders)) == 1 and len(folders) == 8


def test_incomplete_folder_is_converted_again(cheap_conversion: list[Path]) -> None:
    folder = ensure_converted("m")
    (folder / "config.json").unlink()
    assert ensure_converted("m") == folder
    assert len(cheap_conversion) == 2
    assert (folder / "config.json").is_file()


def test_changed_converter_gets_another_folder(
    cheap_conversion: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = ensure_converted("m")
    monkeypatch.setattr(convert, "source_version", lambda: "another")
    assert ensure_converted("m") != before
    assert len(conversion_id()) == 12


def test_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / ".partial-killed").mkdir()

    def fail(folder: Path) -> None:
        (folder / "config.json").write_text("half")
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        publish_folder(tmp_path / "model", fail)
    assert list(tmp_path.iterdir()) == []
    publish_folder(tmp_path / "model", _fill)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("kept_bytes", [0, 3, 1000, 1_000_000])
def test_truncated_file_is_one_clear_error(tmp_path: Path, kept_bytes: int) -> None:
    source = tmp_path / "damaged.gguf"
    with open(find_gguf_file(), "rb") as whole:
        source.write_bytes(whole.read(kept_bytes))
    with pytest.raises(EmbeddedModelError, match="damaged.gguf is not a whole GGUF file"):
        convert_gguf(source, tmp_path)


def test_file_of_another_kind_is_one_clear_error(tmp_path: Path) -> None:
    source = tmp_path / "other.gguf"
    source.write_bytes(b"not a model file" * 100)
    with pytest.raises(EmbeddedModelError, match="other.gguf is not a whole GGUF file"):
        convert_gguf(source, tmp_path)


def test_unwritable_cache_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(EmbeddedModelError, match="set SGLANG_CACHE_DIR"):
        ensure_converted("m")


def test_a_full_disk_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise safetensors.SafetensorError("I/O error: No space left on device")

    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("safetensors.torch.save_file", full)
    monkeypatch.setattr("sglang.embedded.weights.convert_tensors", lambda *_: {})
    with pytest.raises(EmbeddedModelError, match="No space left.*set SGLANG_CACHE_DIR"):
        ensure_converted("m")
    assert not [path for path in tmp_path.rglob("*") if path.suffix]  # nothing half done


def test_cache_root_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SGLANG_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_root() == tmp_path / ".cache" / "sglang-toggle"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "sglang-toggle"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_root() == tmp_path / ".cache" / "sglang-toggle"
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path / "own"))
    assert cache_root() == tmp_path / "own"

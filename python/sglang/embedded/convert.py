"""GGUF file to Hugging Face folder, once, safely beside other processes that want the same.

The folder's path holds an id made from this converter's own source and the version of the weights' package:
a changed converter writes a new folder, and never a mixture of two.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any, Final

from sglang.embedded.cache import cache_root, exclusive_lock, publish_folder
from sglang.embedded.gguf_source import INSTALL_COMMAND, EmbeddedModelError, find_gguf_file, source_version

WRITTEN_FILES: Final = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)

_CONVERTER_SOURCES: Final = ("convert.py", "metadata.py", "tokenizer.py", "weights.py")
_PROGRESS_EVERY: Final = 30  # tensors


def conversion_id() -> str:
    """Return 12 hex digits that change with the converter's source or the weights' version."""
    digest = hashlib.sha256(source_version().encode())
    for name in _CONVERTER_SOURCES:
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()[:12]


def ensure_converted(model_name: str) -> Path:
    """Return the folder ``<cache>/<conversion id>/<model_name>``, converting first where it is missing.

    Of several processes that call this at once, one converts and the others wait for it.

    Raises:
        EmbeddedModelError: the weights' package is missing or not as expected, or the cache can't be written.
    """
    folder = cache_root() / conversion_id() / model_name
    if _is_complete(folder):
        return folder
    source = find_gguf_file()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(folder.parent / ".lock"):
            if not _is_complete(folder):
                publish_folder(folder, lambda partial: convert_gguf(source, partial))
                _say(f"ready in {folder}")
    except OSError as error:
        raise EmbeddedModelError(
            f"Can't write the embedded model into {folder.parent}: {error.strerror or error}."
            " It needs 270 MB; set SGLANG_CACHE_DIR to another folder, or make room."
        ) from error
    return folder


def convert_gguf(source: Path, folder: Path) -> None:
    """Write the model in the GGUF file ``source`` as a Hugging Face model into the existing ``folder``.

    Raises:
        EmbeddedModelError: the file is no GGUF file, or not of the expected architecture.
        OSError: ``folder`` can't be written.
    """
    # Imported here because the usual start finds the folder converted and needs none of these.
    import gguf
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    from sglang.embedded.metadata import generation_config, model_config, read_metadata
    from sglang.embedded.tokenizer import write_tokenizer
    from sglang.embedded.weights import convert_tensors

    _say(f"reading {source.name} (once; about ten seconds)")
    try:
        reader = gguf.GGUFReader(source)
    except (ValueError, IndexError) as error:  # what the reader says of a damaged file is about array shapes
        raise EmbeddedModelError(
            f"{source} is not a whole GGUF file: run `{INSTALL_COMMAND} --force-reinstall`."
        ) from error
    metadata = read_metadata(reader)
    _write_json(folder / "config.json", model_config(metadata))
    _write_json(folder / "generation_config.json", generation_config(metadata))
    write_tokenizer(metadata, folder)
    tensors = convert_tensors(reader.tensors, metadata, _report_progress)
    weights_path = folder / "model.safetensors"
    try:
        save_file(tensors, weights_path, metadata={"format": "pt"})
    except SafetensorError as error:  # what the library says of a full disk
        raise OSError(str(error)) from error
    weights_path.chmod(0o644)


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in WRITTEN_FILES)


def _write_json(path: Path, contents: dict[str, Any]) -> None:
    path.write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")


def _report_progress(done: int, total: int) -> None:
    if done % _PROGRESS_EVERY == 0 or done == total:
        _say(f"converted {done}/{total} tensors")


def _say(message: str) -> None:
    print(f"[embedded model] {message}", file=sys.stderr, flush=True)

"""The model that is served where none is named: SmolLM2-135M-Instruct and its EAGLE-3 drafter."""

from pathlib import Path
from typing import Final

from sglang.embedded.convert import ensure_converted
from sglang.embedded.gguf_source import EmbeddedModelError

EMBEDDED_MODEL_NAME: Final = "SmolLM2-135M-Instruct"

EMBEDDED_DISABLE_BS_THRESHOLD: Final = 64
"""Default of --speculative-disable-bs-threshold for the embedded model, in decoding requests."""

_DRAFTER_FOLDER: Final = "smollm2-eagle3"


def embedded_model_path() -> str:
    """Return the Hugging Face folder of the embedded model; the first call converts it (seconds, 270 MB).

    Raises:
        EmbeddedModelError: it can't be provided; the message says what to do.
    """
    return str(ensure_converted(EMBEDDED_MODEL_NAME))


def embedded_drafter_path() -> str:
    """Return the folder of the EAGLE-3 draft head that comes with the package.

    Raises:
        EmbeddedModelError: the installation lacks it.
    """
    folder = Path(__file__).parent / _DRAFTER_FOLDER
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise EmbeddedModelError(
                f"This installation lacks the embedded drafter's {name} (looked in {folder}):"
                " install it again."
            )
    return str(folder)

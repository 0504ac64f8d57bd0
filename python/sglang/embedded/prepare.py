"""Convert the embedded model now rather than at the first start: ``python -m sglang.embedded.prepare``."""

import sys

from sglang.embedded.gguf_source import EmbeddedModelError
from sglang.embedded.model import embedded_drafter_path, embedded_model_path


def main() -> int:
    """Print the folders of the model and of the drafter; return the process's exit code."""
    try:
        print(f"embedded model:   {embedded_model_path()}")
        print(f"embedded drafter: {embedded_drafter_path()}")
    except EmbeddedModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

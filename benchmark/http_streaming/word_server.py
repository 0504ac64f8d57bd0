"""A whole server without a model: python word_server.py --fake-slots 250 --fake-step-ms 16.7 FLAGS

The other flags are the server's. HTTP, tokenizer, scheduler and detokenizer are those of the server, in
their processes; the executor is ``word_executor``. The embedded model's tokenizer is used where --model-path
names no other.
"""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from word_executor import PAGES_A_SLOT, WordExecutor

from sglang.srt.entrypoints import server_runtime
from sglang.srt.managers import scheduler_process
from sglang.srt.server_args import ServerArgs

_SLOTS: Final = "SGLANG_FAKE_SLOTS"
_STEP_MS: Final = "SGLANG_FAKE_STEP_MS"
_PAGES: Final = "SGLANG_FAKE_PAGES"


def main() -> int:
    """Start the server, with its scheduler process replaced by this file."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--fake-slots", default="250")
    parser.add_argument("--fake-step-ms", default="16.67")
    parser.add_argument("--fake-pages", default="0", help="of one token each; 0: enough for long streams")
    fake, flags = parser.parse_known_args()
    here = str(Path(__file__).parent)
    environ = {_SLOTS: fake.fake_slots, _STEP_MS: fake.fake_step_ms, _PAGES: fake.fake_pages}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    os.environ.update(environ)
    start = server_runtime.start_child

    def start_fake(name: str, module: str, config: bytes, **kwargs: Any) -> Any:
        return start(name, "word_scheduler" if name == "scheduler" else module, config, **kwargs)

    server_runtime.start_child = start_fake
    from sglang.launch_server import main as launch

    return launch(flags)


def _build(args: ServerArgs, on_failure: Callable[[str], None]) -> WordExecutor:
    slots, pages = int(os.environ[_SLOTS]), int(os.environ[_PAGES])
    return WordExecutor(args, slots, float(os.environ[_STEP_MS]) / 1000, pages or slots * PAGES_A_SLOT)


def run_scheduler() -> None:
    """In the scheduler's process."""
    scheduler_process._build_executor = _build
    scheduler_process.main()


if __name__ == "__main__":
    sys.exit(main())

"""Makes every test file runnable alone, and keeps a shared machine responsive."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TEST_ROOT = Path(__file__).resolve().parent
for folder in (TEST_ROOT.parent / "python", TEST_ROOT.parent / "sgl-kernel" / "python", TEST_ROOT):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import torch  # noqa: E402  (after the paths, so that a test run never picks up another sglang)

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def log_level_of_each_test_alone() -> Iterator[None]:
    """An Engine sets the level of its process: the next test must not inherit it."""
    yield
    logging.getLogger("sglang").setLevel(logging.NOTSET)

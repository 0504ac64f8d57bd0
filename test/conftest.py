"""Makes every test file runnable alone, and keeps a shared machine responsive."""

import sys
from pathlib import Path

TEST_ROOT = Path(__file__).resolve().parent
for folder in (TEST_ROOT.parent / "python", TEST_ROOT.parent / "sgl-kernel" / "python", TEST_ROOT):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import torch  # noqa: E402  (after the paths, so that a test run never picks up another sglang)

torch.set_num_threads(1)

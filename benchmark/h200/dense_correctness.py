"""Are models with ordinary attention right on the GPU? Small random ones against the CPU's float32.

    python benchmark/h200/dense_correctness.py --out dense_correctness.jsonl
    python benchmark/h200/dense_correctness.py --device cpu --tiny       # does it run?

The models are those of ``dense_models.py``; ``small_correctness.py`` says what is compared.
The exit code is 1 if a part fails.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.h200.dense_models import CASES
from benchmark.h200.small_correctness import run

if __name__ == "__main__":
    sys.exit(run(CASES, __doc__, None))

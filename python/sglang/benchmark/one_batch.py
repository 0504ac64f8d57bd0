"""``python -m sglang.benchmark.one_batch``: the newer name of `sglang.bench_one_batch`."""

from __future__ import annotations

import sys

from sglang.bench_one_batch import main

if __name__ == "__main__":
    sys.exit(main())

"""``python -m sglang.bench_one_batch_server``: the older name of `sglang.benchmark.one_batch_server`."""

from __future__ import annotations

import sys

from sglang.benchmark.one_batch_server import main

if __name__ == "__main__":
    sys.exit(main())

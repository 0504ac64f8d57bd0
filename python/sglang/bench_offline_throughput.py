"""``python -m sglang.bench_offline_throughput``: the older name of `sglang.benchmark.offline_throughput`."""

from __future__ import annotations

import sys

from sglang.benchmark.offline_throughput import main

if __name__ == "__main__":
    sys.exit(main())

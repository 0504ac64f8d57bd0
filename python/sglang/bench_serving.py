"""``python -m sglang.bench_serving``: the name that every guide has for `sglang.benchmark.serving`."""

from __future__ import annotations

import sys

from sglang.benchmark.serving import main

if __name__ == "__main__":
    sys.exit(main())

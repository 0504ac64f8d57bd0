"""How long PyTorch's CPU threads wait for each other before they sleep."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import Final

# Some 20 µs: longer than the gap between two layers, far shorter than a time slice.
SPIN_COUNT: Final = 4000


def spin_briefly(environ: MutableMapping[str, str] = os.environ) -> None:
    """Call before torch is imported; a user's own setting stands.

    A step is hundreds of parallel regions. GNU OpenMP's threads spin for milliseconds at the end of
    each: good alone, but where another process computes on the same cores each region waits for a
    time slice, and a step takes twenty times as long. If they sleep at once, waking them costs half
    as much again as the step (docs/perf_log.md).
    """
    if "GOMP_SPINCOUNT" not in environ and "OMP_WAIT_POLICY" not in environ:
        environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)

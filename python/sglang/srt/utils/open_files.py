"""Every connection is an open file, and the limit on those that a shell hands on is often 1024."""

from __future__ import annotations

import resource


def allow_many_files() -> None:
    """As many as the system allows this process, and those that it starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

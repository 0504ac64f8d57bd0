"""The listening socket of a server that is still loading. Run alone: pytest THIS_FILE"""

from __future__ import annotations

import pytest

from sglang.srt.entrypoints.http_server import listen, open_port
from sglang.srt.entrypoints.prepare import StartError


def test_of_two_that_start_at_once_the_second_says_why_it_can_not() -> None:
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with listen("127.0.0.1", port) as second:  # neither listens yet: both may bind
            open_port(first)
            with pytest.raises(StartError, match=f"127.0.0.1:{port}.*--port"):
                open_port(second)
        with pytest.raises(StartError, match=f"{port}.*in use"):
            listen("127.0.0.1", port)

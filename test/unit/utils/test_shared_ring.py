"""Messages through shared memory: all of them arrive, whole and in order, at every reader.

Run alone: pytest THIS_FILE
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.utils.shared_ring import (
    NUM_SLOTS,
    SLOT_BYTES,
    RingClosedError,
    RingReader,
    RingWriter,
    create_ring,
)


@contextmanager
def ring(num_readers: int) -> Iterator[tuple[RingWriter, list[RingReader], list[int]]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bells = create_ring(folder, "r", num_readers)
        writer = RingWriter(folder, "r", num_readers)
        readers = [RingReader(folder, "r", num_readers, i) for i in range(num_readers)]
        yield writer, readers, bells
        for one in (writer, *readers):
            one.close()
        for bell in bells:
            os.close(bell)


def receive_all(reader: RingReader, count: int, delay_s: float) -> list[bytes]:
    messages = []
    for _ in range(count):
        time.sleep(delay_s)
        message = reader.receive(20.0)
        assert message is not None
        messages.append(message)
    return messages


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 3 * SLOT_BYTES), min_size=1, max_size=12),
    num_readers=st.integers(1, 4),
    slow=st.integers(-1, 3),
)
def test_every_reader_gets_every_message(sizes: list[int], num_readers: int, slow: int) -> None:
    messages = [bytes([i % 251]) * size for i, size in enumerate(sizes)]
    with ring(num_readers) as (writer, readers, _):
        got: dict[int, list[bytes]] = {}

        def read(index: int) -> None:
            got[index] = receive_all(readers[index], len(messages), 0.001 if index == slow else 0.0)

        threads = [threading.Thread(target=read, args=(i,)) for i in range(num_readers)]
        for thread in threads:
            thread.start()
        for message in messages:
            writer.send(message)
        for thread in threads:
            thread.join()
        assert got == dict.fromkeys(range(num_readers), messages)


def test_a_message_larger_than_the_ring_waits_for_its_reader() -> None:
    message = os.urandom(SLOT_BYTES) * (2 * NUM_SLOTS)
    with ring(2) as (writer, readers, _):
        sending = threading.Thread(target=writer.send, args=(message,))
        sending.start()
        assert readers[0].receive(0.2) is None and sending.is_alive()  # the second one has read nothing
        others: list[bytes | None] = []
        other = threading.Thread(target=lambda: others.append(readers[1].receive(20.0)))
        other.start()
        assert readers[0].receive(20.0) == message
        other.join()
        sending.join()
        assert others == [message]


def test_a_writer_without_living_readers_gives_up() -> None:
    with ring(1) as (writer, _, _):
        writer.send(bytes(SLOT_BYTES * (NUM_SLOTS + 2)), alive=lambda: False)


def test_a_reader_waits_no_longer_than_it_is_told() -> None:
    with ring(1) as (_, readers, _):
        began = time.monotonic()
        assert readers[0].receive(0.05) is None
        assert 0.04 <= time.monotonic() - began < 1.0


def test_a_reader_finds_the_writer_gone() -> None:
    with tempfile.TemporaryDirectory() as name:
        (bell,) = create_ring(Path(name), "r", 1)
        reader = RingReader(Path(name), "r", 1)
        os.close(bell)
        with pytest.raises(RingClosedError):
            reader.receive(1.0)

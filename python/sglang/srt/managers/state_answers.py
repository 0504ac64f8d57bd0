"""Answers to ``GetStateRequest`` in a thread of the scheduler's process.

The scheduler's loop waits for the device most of the time, for seconds in a long prefill step on a CPU.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from sglang.srt.managers.io_struct import ControlReply, encode, state_decoder
from sglang.srt.utils.ipc import Receiver, endpoint
from sglang.srt.utils.routes import RoutedSender

logger = logging.getLogger(__name__)


def state_endpoint(folder: Path) -> str:
    return endpoint(folder, "state")


def answer_states(
    folder: Path,
    state: Callable[[], dict[str, Any]],
    live: Callable[[int], dict[str, Any]],
    num_workers: int = 1,
) -> None:
    """Start the thread. ``state`` and ``live`` (of the steps after a number) are called in it, and must not
    need the loop's help.
    """
    # A context of its own: when the process ends, the others are closed by another thread.
    context: zmq.Context[Any] = zmq.Context()
    receiver = Receiver(state_endpoint(folder), state_decoder.decode, context)
    replies = RoutedSender(folder, num_workers, encode, context)

    def serve() -> None:
        while True:
            receiver.wait(None)
            for message in receiver.receive_all():
                body = state()
                if message.after_step is not None:
                    body = {**body, "live": live(message.after_step)}
                reply = ControlReply(message.request_id, ok=True, body=body)
                replies.answer(message.request_id, reply)

    def serve_or_die() -> None:
        try:
            serve()
        except BaseException:  # the thread's edge: without it nobody would hear of the server's state
            logger.exception("the thread that answers /server_info failed: the server ends")
            os._exit(1)

    threading.Thread(target=serve_or_die, name="state-answers", daemon=True).start()

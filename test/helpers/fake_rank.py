"""A worker process without a model: answers plans at once, or fails as its configuration says."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from sglang.srt.model_executor.rank_messages import (
    PLANS,
    RESULTS,
    Failed,
    Started,
    Stopped,
    decode_masks,
    decode_plan,
    encode,
    status_ring,
)
from sglang.srt.model_executor.step_plan import ExecutorInfo, StepDrafts, StepResult
from sglang.srt.utils.child_process import end_with_parent, read_config
from sglang.srt.utils.shared_ring import RingClosedError, RingReader, RingWriter


def fail(how: Any, status: RingWriter) -> None:
    """``how``: an exit code, a signal's name, or the fields of a ``Failed``."""
    if isinstance(how, str):
        os.kill(os.getpid(), getattr(signal, how))
    if isinstance(how, dict):
        status.send(encode(Failed(**how)))
    sys.stdout.flush()
    os._exit(how if isinstance(how, int) else 1)


def main() -> None:
    """Where the parent has gone the folder goes too, whichever thread sees it first: as a worker does it."""
    config = json.loads(read_config())
    try:
        serve(config)
    except RingClosedError:
        shutil.rmtree(config["folder"], ignore_errors=True)
        os._exit(1)


def serve(config: dict[str, Any]) -> None:
    folder, rank, size = Path(config["folder"]), config["rank"], config["size"]
    end_with_parent(lambda: shutil.rmtree(folder, ignore_errors=True))
    status = RingWriter(folder, status_ring(rank), 1)
    if "at_start" in config:
        fail(config["at_start"], status)
    info = ExecutorInfo(4, 64, 1, 64, 256, None, 0, weight_bytes=rank)
    plans = RingReader(folder, PLANS, size, rank)
    results = RingWriter(folder, RESULTS, 1) if rank == 0 else None
    status.send(encode(Started(info)))
    while message := plans.receive():
        plan = decode_plan(message)
        if plan.step_id == config.get("fails_at"):
            time.sleep(config.get("after_s", 0.0))
            fail(config["how"], status)
        if results is not None:
            tokens = tuple((slot,) for slot in plan.decode_slots)
            if plan.masked and plan.draft_len:
                results.send(encode(StepDrafts(plan.step_id, tokens)))
        if plan.masked:  # what it is told comes back as what was chosen
            message = plans.receive()
            if not message:
                break
            supplied = decode_masks(message)
            tokens = tuple((token,) for token in supplied.masks[:100])
        if results is not None:
            result = StepResult(plan.step_id, tokens, (False,) * len(tokens), 0.5, launch_time_s=0.25)
            results.send(encode(result))
    status.send(encode(Stopped()))


if __name__ == "__main__":
    main()

"""What goes between a scheduler and its workers of one rank each, as msgpack: no code is in it."""

from __future__ import annotations

from typing import Final

import msgspec

from sglang.srt.model_executor.step_plan import ExecutorInfo, StepDrafts, StepMidInput, StepPlan, StepResult

PLANS: Final = "plans"
"""Ring from the scheduler to all ranks: plans, a masked one's masks behind it; an empty one is the end."""

RESULTS: Final = "results"
"""Ring from rank 0 to the scheduler: a plan's result; before it the drafts of a masked speculative one."""


def status_ring(rank: int) -> str:
    """Ring from a rank to the scheduler: ``Started``, or ``Failed`` at any time."""
    return f"status-{rank}"


class Started(msgspec.Struct, frozen=True, tag=True):
    info: ExecutorInfo


class Failed(msgspec.Struct, frozen=True, tag=True):
    error: str
    for_user: bool = False  # the error is a line for the user
    peer_lost: bool = False  # another rank is to blame


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """The end was asked for, and reached."""


encode = msgspec.msgpack.encode
decode_plan = msgspec.msgpack.Decoder(StepPlan).decode
decode_masks = msgspec.msgpack.Decoder(StepMidInput).decode
decode_drafts = msgspec.msgpack.Decoder(StepDrafts).decode
decode_result = msgspec.msgpack.Decoder(StepResult).decode
decode_status = msgspec.msgpack.Decoder(Started | Failed | Stopped).decode

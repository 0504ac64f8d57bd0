"""Flags of priorities. ``ServerArgs`` inherits them."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.configs.operations_args import OperationsArgs
from sglang.srt.utils.flags import ServerArgsError, flag

_GROUP = "memory and schedule"


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorityArgs(OperationsArgs):
    enable_priority_scheduling: bool = flag(
        False,
        bool,
        _GROUP,
        "requests of a higher priority go first, and may take the place of running ones; without this flag"
        " the field priority has no effect",
    )
    schedule_low_priority_values_first: bool = flag(
        False, bool, _GROUP, "the lower the number, the higher the priority"
    )
    priority_scheduling_preemption_threshold: int = flag(
        10,
        int,
        _GROUP,
        "a request takes the place of a running one whose priority is lower by more than this",
    )
    disable_priority_preemption: bool = flag(
        False, bool, _GROUP, "priorities order the queue alone: what runs goes on"
    )
    enable_custom_logit_processor: bool = flag(
        False,
        bool,
        "sampling",
        "requests may bring custom logit processors: code of theirs, which runs in the server",
    )
    abort_on_priority_when_disabled: bool = flag(
        False, bool, _GROUP, "without --enable-priority-scheduling: refuse requests with a priority"
    )


@dataclass(frozen=True, slots=True)
class PriorityRules:
    """Where priorities count."""

    low_first: bool = False
    preemption_threshold: int | None = 10  # None: what runs goes on

    def rank(self, priority: int | None) -> int:
        """Higher ones go first; those without a priority are the last."""
        if priority is None:
            return -(2**63)
        return -priority if self.low_first else priority


def priority_rules(args: PriorityArgs) -> PriorityRules | None:
    """None: priorities do not count."""
    if not args.enable_priority_scheduling:
        return None
    threshold = args.priority_scheduling_preemption_threshold
    return PriorityRules(
        args.schedule_low_priority_values_first, None if args.disable_priority_preemption else threshold
    )


def check_priority_flags(args: PriorityArgs) -> None:
    """
    Raises:
        ServerArgsError: a flag says nothing without another, or is out of range.
    """
    if args.priority_scheduling_preemption_threshold < 0:
        raise ServerArgsError("--priority-scheduling-preemption-threshold must be >= 0")
    if args.enable_priority_scheduling and args.abort_on_priority_when_disabled:
        raise ServerArgsError(
            "--abort-on-priority-when-disabled is for servers without --enable-priority-scheduling:"
            " leave one of them out"
        )
    if args.enable_priority_scheduling:
        return
    for name in ("schedule_low_priority_values_first", "disable_priority_preemption"):
        if getattr(args, name):
            raise ServerArgsError(f"--{name.replace('_', '-')} needs --enable-priority-scheduling")

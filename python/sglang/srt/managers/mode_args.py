"""What a server's arguments say about the mode of its steps: a threshold, ``auto``, or a schedule."""

from __future__ import annotations

import logging
from pathlib import Path

from sglang.srt.configs.speculative_args import AUTO
from sglang.srt.model_executor.step_plan import ExecutorInfo, SpecShape
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.auto_table import AutoTable
from sglang.srt.speculative.controller import AutoController
from sglang.srt.speculative.cost_table import CostTable, CostTableError
from sglang.srt.speculative.schedule import BsSchedule, ScheduleError, parse_bs_schedule
from sglang.srt.utils.flags import ServerArgsError

logger = logging.getLogger(__name__)


def check_mode(args: ServerArgs) -> None:
    """What can be said before a model is loaded. ``args`` are resolved.

    Raises:
        ServerArgsError: no schedule, one that this server can't follow, or a table that can't be used.
    """
    if args.speculative_algorithm is None:
        return
    schedule = schedule_of(args)
    if schedule is not None:
        _check_schedule(schedule, args)
    if args.speculative_auto_table is not None:
        load_table(args.speculative_auto_table, _shape(args))


def schedule_of(args: ServerArgs) -> BsSchedule | None:
    if args.speculative_bs_schedule is None:
        return None
    try:
        return parse_bs_schedule(args.speculative_bs_schedule)
    except ScheduleError as error:
        raise ServerArgsError(f"--speculative-bs-schedule: {error}") from error


def _check_schedule(schedule: BsSchedule, args: ServerArgs) -> None:
    num_steps, capture = _shape(args).num_steps, args.speculative_capture_max_bs
    longest = max(schedule.draft_lens, default=0)
    if longest > num_steps:
        raise ServerArgsError(
            f"--speculative-bs-schedule names {longest} drafts, and --speculative-num-steps is {num_steps}:"
            " raise that, or lower the schedule"
        )
    most = schedule.max_spec_rows
    if capture is not None and most is not None and most > capture:
        raise ServerArgsError(
            f"--speculative-bs-schedule speculates with up to {most} requests: raise"
            f" --speculative-capture-max-bs {capture} to at least that, or leave it out"
        )


def _shape(args: ServerArgs) -> SpecShape:
    steps, topk = args.speculative_num_steps, args.speculative_eagle_topk
    assert steps is not None and topk is not None
    return SpecShape(steps, topk, args.speculative_num_draft_tokens or 0)


def load_table(path: str, shape: SpecShape) -> AutoTable:
    """
    Raises:
        ServerArgsError: one line for the user.
    """
    flag = f"--speculative-auto-table {path}"
    try:
        table = AutoTable.from_json(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ServerArgsError(f"{flag} can't be read: {error}") from error
    except CostTableError as error:
        raise ServerArgsError(f"{flag}: {error} (python -m sglang.tune_spec --save makes one)") from error
    if table.shape != shape:
        raise ServerArgsError(
            f"{flag} is for {_told(table.shape)}, and this server has {_told(shape)}: make one for it with"
            " python -m sglang.tune_spec, or start with the shape of the table"
        )
    return table


def _told(shape: SpecShape) -> str:
    return f"{shape.num_steps} steps, topk {shape.topk}, {shape.num_draft_tokens} draft tokens"


def spec_rows(args: ServerArgs) -> tuple[tuple[int, int | None], ...]:
    """Draft lengths for which steps are captured, and the most rows of each; (): only the longest.

    None: as many rows as any captured step may have.
    """
    if args.speculative_disable_bs_threshold == AUTO:
        return tuple((draft_len, None) for draft_len in range(1, _shape(args).num_steps + 1))
    schedule = schedule_of(args)
    if schedule is None:
        return ()
    if args.speculative_capture_max_bs is not None:  # so that another schedule can be set later
        return tuple((draft_len, None) for draft_len in schedule.draft_lens)
    return tuple((draft_len, schedule.max_rows_of(draft_len)) for draft_len in schedule.draft_lens)


def may_be_ragged(args: ServerArgs) -> bool:
    """Whether `auto` may give rows draft lengths of their own: on a GPU, for chains, where the costs of such
    steps are measured or in the table given.
    """
    if args.speculative_algorithm is None or args.speculative_disable_bs_threshold != AUTO:
        return False
    if args.device != "cuda" or _shape(args).topk > 1:
        return False
    file = args.speculative_auto_table
    return file is None or bool(load_table(file, _shape(args)).table.ragged)


def auto_controller(args: ServerArgs, info: ExecutorInfo) -> AutoController | None:
    """What ``auto`` begins with; None where nothing is known of costs: then it can't be chosen.

    Raises:
        ServerArgsError: a table that can't be used.
    """
    if info.spec is None:
        return None
    num_slots = info.num_slots if info.ragged_sizes else 0
    if args.speculative_auto_table is not None:
        table = load_table(args.speculative_auto_table, info.spec)
        if table.device != info.device_name:
            logger.warning(
                "%s was measured on %s, and this is %s: its step times are corrected as steps are run",
                args.speculative_auto_table, table.device, info.device_name,
            )  # fmt: skip
        return AutoController(table.table, info.spec.num_steps, table.acceptance, num_slots=num_slots)
    if not info.costs:
        return None
    costs = CostTable.from_costs(info.costs, padded=bool(info.graphs))
    return AutoController(costs, info.spec.num_steps, num_slots=num_slots)


def when_speculative(args: ServerArgs) -> str:
    """For people."""
    threshold = args.speculative_disable_bs_threshold
    if args.speculative_bs_schedule is not None:
        return f"by the schedule {args.speculative_bs_schedule}"
    if threshold == AUTO:
        return "as measured costs and acceptance say, step by step"
    return "always" if threshold is None else f"while at most {threshold} requests decode"

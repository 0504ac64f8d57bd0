"""A server on the fake executor, with faults on demand: python -m helpers.faulty_server FLAGS

Prompts are orders: NAN (its row is not finite, once), RAISE and HANG (the next step does). Steps take 10 ms.
FAULTY_PAGES in the environment: KV places, where these are not to be few.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any, Final

from helpers.fake_executor import FakeExecutor, FakeModel, FakePending

from sglang.srt.managers import scheduler_process
from sglang.srt.model_executor.step_plan import ExecutorInfo, StepPlan, StepResult
from sglang.srt.server_args import ServerArgs

NUM_PAGES: Final = 240
CONTEXT_LEN: Final = 4096
_STEP_S: Final = 0.01


class FaultyExecutor(FakeExecutor):
    def __init__(self) -> None:
        info = ExecutorInfo(
            num_slots=8,
            num_pages=int(os.environ.get("FAULTY_PAGES", NUM_PAGES)),
            page_size=1,
            context_len=CONTEXT_LEN,
            vocab_size=256,
            spec=None,
            max_spec_rows=0,
        )
        super().__init__(info, FakeModel(vocab_size=256))
        self._order = ""

    def launch(self, plan: StepPlan) -> FakePending:
        order, self._order = self._order, ""
        if order == "RAISE":
            raise RuntimeError("the executor broke, as ordered")
        if order == "HANG":
            time.sleep(3600)
        for chunk in plan.prefill:
            text = bytes(token for token in chunk.token_ids if token < 256).decode("ascii", "replace")
            if text.startswith("NAN"):
                self.fault_slots.append(chunk.slot)
            elif text in ("RAISE", "HANG"):
                self._order = text
        return super().launch(plan)

    def finish(self, pending: FakePending) -> StepResult:
        time.sleep(_STEP_S)
        return super().finish(pending)


def _build(args: ServerArgs, on_failure: Callable[[str], None]) -> FaultyExecutor:
    return FaultyExecutor()


def main() -> int:
    from sglang.launch_server import main as launch
    from sglang.srt.entrypoints import server_runtime

    start = server_runtime.start_child

    def start_faulty(name: str, module: str, config: bytes, **kwargs: Any) -> Any:
        return start(name, "helpers.faulty_scheduler" if name == "scheduler" else module, config, **kwargs)

    server_runtime.start_child = start_faulty
    return launch(sys.argv[1:])


def run_scheduler() -> None:
    scheduler_process._build_executor = _build
    scheduler_process.main()


if __name__ == "__main__":
    sys.exit(main())

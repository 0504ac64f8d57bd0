"""An executor that computes nothing: steps take a set time, tokens are words that say when they were made.

One step runs at a time and the next is launched before it is waited for, as with a GPU.
"""

import random
import time
from typing import Final

from stamps import Stamper

from sglang.srt.model_executor.step_plan import (
    ExecutorInfo,
    SpecShape,
    StepDrafts,
    StepMidInput,
    StepPlan,
    StepResult,
)
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.text_tokenizer import TextTokenizer

PAGES_A_SLOT: Final = 1024  # of one token each: enough for long streams
_ACCEPT: Final = 0.5  # of drafts
_PREFILL_TOKEN_S: Final = 10e-6  # of a step that decodes nothing; one that decodes takes the set time


class TimedStep:
    def __init__(self, executor: "WordExecutor", plan: StepPlan, end: float) -> None:
        self._executor = executor
        self._plan = plan
        self._end = end

    def drafts(self) -> StepDrafts:
        raise AssertionError("nothing here proposes drafts: grammars can't be asked for")

    def wait(self) -> StepResult:
        left = self._end - time.monotonic()
        if left > 0:
            time.sleep(left)
        return self._executor.result(self._plan)


class WordExecutor:
    def __init__(self, args: ServerArgs, slots: int, step_s: float, pages: int) -> None:
        assert args.tokenizer_path is not None
        tokenizer = TextTokenizer.from_folder(args.tokenizer_path)
        steps = args.speculative_num_steps if args.speculative_algorithm is not None else None
        self.info = ExecutorInfo(
            num_slots=slots,
            num_pages=pages,
            page_size=1,
            context_len=args.context_length or 8192,
            vocab_size=tokenizer.vocab_size,
            spec=None if steps is None else SpecShape(steps),
            max_spec_rows=0 if steps is None else slots,
            draft_lens=() if steps is None else tuple(range(1, steps + 1)),
        )
        self._stamper = Stamper(tokenizer)
        self._step_s = step_s
        self._busy_until = 0.0
        self._random = random.Random(0)

    def launch(self, plan: StepPlan) -> TimedStep:
        tokens = sum(len(chunk.token_ids) for chunk in plan.prefill)
        takes = self._step_s if plan.decode_slots else tokens * _PREFILL_TOKEN_S
        self._busy_until = max(self._busy_until, time.monotonic()) + takes
        return TimedStep(self, plan, self._busy_until)

    def supply(self, masks: StepMidInput) -> None:
        raise AssertionError("no step is masked without drafts to mask")

    def result(self, plan: StepPlan) -> StepResult:
        token = self._stamper.token()
        tokens = [(token,) * (self._num_accepted(plan.draft_len) + 1) for _ in plan.decode_slots]
        tokens += [(token,) if chunk.is_last else () for chunk in plan.prefill]
        return StepResult(plan.step_id, tuple(tokens), (False,) * len(tokens), self._step_s)

    def _num_accepted(self, draft_len: int) -> int:
        count = 0
        while count < draft_len and self._random.random() < _ACCEPT:
            count += 1
        return count

    def shutdown(self) -> None:
        return None

"""Requests with a grammar wait until it is compiled; rows with one, or with rules, get masks in each step."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sglang.srt.constrained.compiling import Compilation, GrammarCompiler
from sglang.srt.constrained.constraint import Constraint
from sglang.srt.constrained.grammar import GrammarSpec, Masks, Matcher
from sglang.srt.constrained.rules import NoGrammar, make_rules
from sglang.srt.constrained.vocabulary import Vocabulary, blank_vocabulary
from sglang.srt.managers.finish import BAD_REQUEST, INTERNAL_ERROR, Finisher, abort_reason
from sglang.srt.managers.io_struct import FinishReason
from sglang.srt.managers.planner import PlannedStep
from sglang.srt.managers.request import Request, RequestState
from sglang.srt.managers.request_table import RequestTable
from sglang.srt.managers.stop_checker import StopHit
from sglang.srt.model_executor.step_plan import RowEdit, StepDrafts, StepMidInput

NO_BACKEND = (
    "this server was started with --grammar-backend none: json_schema, regex, ebnf, structural_tag and"
    " response_format can't be used"
)
DEAD_END = "no token of this model's vocabulary goes on as the grammar wants: the output ends here"
BROKEN = "the grammar's library failed in the middle of this request, and the output ends here: see the log"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Held:
    request: Request
    compilation: Compilation


class Grammars:
    def __init__(
        self,
        compiler: GrammarCompiler | None,
        table: RequestTable,
        finisher: Finisher,
        decode: Callable[[list[int]], str],
        vocab_size: int,
    ) -> None:
        """``compiler`` None: --grammar-backend none."""
        self._compiler = compiler
        self._table = table
        self._finisher = finisher
        self._decode = decode
        self._blank = blank_vocabulary(vocab_size)
        self._held: list[_Held] = []
        # A step's masks. One is on its way at most: the next step's wait until it has been committed.
        self._words: Masks = np.empty(0, np.int32)

    @property
    def has_backend(self) -> bool:
        return self._compiler is not None

    @property
    def is_compiling(self) -> bool:
        return bool(self._held)

    # ---- before a request may run

    def add_rules(self, request: Request) -> None:
        """To a request without a grammar."""
        if request.rules is not None and request.rules.need_masks:
            request.constraint = self._constraint(request, NoGrammar(), self._blank)

    def enqueue(self, request: Request, spec: GrammarSpec) -> None:
        """The request waits for its grammar, then as all others do."""
        assert self._compiler is not None
        self._table.hold(request)
        self._held.append(_Held(request, self._compiler.compilation(spec)))
        self.release_ready()

    def release_ready(self) -> None:
        """Let those run whose grammars are there; answer those whose grammars can't be used."""
        if not self._held:
            return
        assert self._compiler is not None
        self._compiler.poll()
        still_held = []
        for held in self._held:
            request, compilation = held.request, held.compilation
            if request.state is not RequestState.HELD:  # aborted meanwhile
                continue
            if compilation.error is not None:
                self._finisher.finish(request, abort_reason(compilation.error, BAD_REQUEST))
            elif compilation.compiled is None:
                still_held.append(held)
            else:
                matcher = compilation.compiled.matcher()
                request.constraint = self._constraint(request, matcher, self._compiler.vocabulary)
                self._table.release_held(request)
        self._held = still_held

    def _constraint(self, request: Request, matcher: Matcher, vocabulary: Vocabulary) -> Constraint:
        return Constraint(
            matcher,
            vocabulary,
            request.params.min_new_tokens,
            tuple(sorted(request.stop_ids)),
            request.reasoning_end,
            make_rules(request.rules, self._decode),
        )

    def wait(self, timeout_s: float) -> None:
        """There is nothing else to do."""
        assert self._compiler is not None
        self._compiler.wait(timeout_s)

    # ---- in a step

    def masks(self, step: PlannedStep, drafts: StepDrafts | None) -> StepMidInput:
        """For a masked step, when everything launched before it has been committed.

        ``drafts``: of a speculative one. A request whose library fails ends here; what its row chooses
        without a mask is seen by nobody.
        """
        plan = step.plan
        first_chunk = len(plan.decode_slots)
        requests = (*step.decode_requests, *step.prefill_requests)
        num_nodes = 1 if drafts is None or not drafts.tokens else len(drafts.tokens[0])
        out = self._room(len(requests), num_nodes)
        rows: list[int] = []
        edits: list[RowEdit] = []
        for row, request in enumerate(requests):
            constraint = request.constraint
            if not request.waits_for_host or request.finish is not None:
                continue
            if row >= first_chunk and not plan.prefill[row - first_chunk].is_last:
                continue
            tokens: Sequence[int] = request.ids[-1:]
            parents = None
            if drafts is not None:
                tokens = drafts.tokens[row]
                parents = None if drafts.parents is None else drafts.parents[row]
            if request.processor is not None:
                edits.append(_edit(row, request, tokens, parents))
            if constraint is None:
                continue
            most = request.max_accepted(plan.draft_len)
            try:
                constraint.write_masks(out[len(rows)], request.num_outputs, tokens, parents, most)
            except Exception:
                self._finisher.finish(request, _broken(request))
                continue
            rows.append(row)
        masks = out[: len(rows)].data.cast("B") if rows else memoryview(b"")
        return StepMidInput(plan.step_id, tuple(rows), num_nodes, masks, tuple(edits))

    def _room(self, num_rows: int, num_nodes: int) -> Masks:
        """[rows, nodes, words], in the same memory every time: new memory costs more than what is written."""
        size = (num_rows, num_nodes, self._blank.num_words)
        if self._words.size < math.prod(size):
            self._words = np.empty(math.prod(size), np.int32)
        return self._words[: math.prod(size)].reshape(size)


def _edit(row: int, request: Request, tokens: Sequence[int], parents: Sequence[int] | None) -> RowEdit:
    """For its custom logit processor. ``tokens``: of the nodes verified, parents first."""
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, len(tokens)):
        paths.append((*paths[node - 1 if parents is None else parents[node]], tokens[node]))
    return RowEdit(row, request.slot, request.prompt_len, tuple(request.ids), tuple(paths))


def _broken(request: Request) -> FinishReason:
    """Whatever a library raises about one text is no reason to end the others."""
    logger.exception("request %s: its grammar's library failed", request.rid)
    return abort_reason(BROKEN, INTERNAL_ERROR)


def held_to_grammar(request: Request, tokens: Sequence[int], hit: StopHit | None) -> StopHit | None:
    """The grammar takes the new ids; ``hit``: where they stop without it. Where they stop with it."""
    constraint = request.constraint
    if constraint is None:
        return hit
    num_kept = hit.num_kept if hit is not None else len(tokens)
    for count, token in enumerate(tokens[:num_kept], start=1):
        try:
            taken = constraint.advance(token)
        except Exception:
            return StopHit(count - 1, _broken(request))
        if not taken:
            return StopHit(count - 1, abort_reason(DEAD_END, BAD_REQUEST))
        if constraint.is_terminated:
            if hit is not None and count == num_kept:
                return hit
            return StopHit(count, FinishReason(type="stop", matched=token))
    if constraint.is_over(request.num_outputs + num_kept):
        request.constraint = None  # steps of this request alone need no masks any more
    return hit

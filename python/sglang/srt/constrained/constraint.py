"""The grammar and the rules of one request: how far its text has come, and the masks of what may follow.

One object from the request's beginning to its end. It moves on with the tokens that are committed, whatever
mode chose them; drafts are walked along and taken back.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from sglang.srt.constrained.grammar import ANYTHING, Masks, Matcher, allow
from sglang.srt.constrained.rules import NoGrammar, TokenRule
from sglang.srt.constrained.vocabulary import Vocabulary
from sglang.srt.sampling.sampling_params import ReasoningEnd


class Phase(Enum):
    UNDECIDED = 0  # the first token says whether there is a reasoning
    OPEN = 1
    OVER = 2


class Reasoning:
    """The text before the grammar's: it ends with a marker, and anything may be in it.

    Bytes are compared, so that it does not matter how the marker is cut into tokens.
    """

    def __init__(self, end: ReasoningEnd, vocabulary: Vocabulary) -> None:
        self._marker = end.text.encode()
        self._tokens = vocabulary.tokens
        self.begin_id = end.begin_id
        # And the end of the text, in which the marker may have begun.
        self.state = (Phase.OPEN if self.begin_id is None else Phase.UNDECIDED, b"")

    @property
    def phase(self) -> Phase:
        return self.state[0]

    def takes(self, token: int) -> bool:
        """Go on with ``token``, unless it is none of the reasoning's."""
        phase, tail = self.state
        if phase is Phase.UNDECIDED:
            self.state = (Phase.OPEN if token == self.begin_id else Phase.OVER, b"")
            return token == self.begin_id
        if phase is Phase.OVER:
            return False
        # What the token has after the marker belongs to neither part.
        text = tail + (self._tokens[token] if 0 <= token < len(self._tokens) else b"")
        keep = len(self._marker) - 1
        self.state = (Phase.OVER if self._marker in text else Phase.OPEN, text[-keep:] if keep else b"")
        return True


class Constraint:
    def __init__(
        self,
        matcher: Matcher,
        vocabulary: Vocabulary,
        min_new_tokens: int = 0,
        suppressed_ids: tuple[int, ...] = (),
        reasoning_end: ReasoningEnd | None = None,
        rules: tuple[TokenRule, ...] = (),
    ) -> None:
        """``suppressed_ids``: not before ``min_new_tokens``, unless nothing else may follow. ``rules``: each
        has a say unless it would leave nothing of what those before it do.
        """
        self._matcher = matcher
        self._rules = rules
        self._min_new_tokens = min_new_tokens if suppressed_ids else 0
        self._unsuppressed = vocabulary.mask_without(suppressed_ids)  # [words]
        self._reasoning = None if reasoning_end is None else Reasoning(reasoning_end, vocabulary)
        # Of each token accepted and not committed: the reasoning's state before, whether the matcher took it.
        self._history: list[tuple[tuple[Phase, bytes] | None, bool]] = []

    @property
    def is_terminated(self) -> bool:
        return self._matcher.is_terminated

    def is_over(self, num_outputs: int) -> bool:
        """It will never forbid anything again."""
        if not isinstance(self._matcher, NoGrammar) or num_outputs < self._min_new_tokens:
            return False
        return all(rule.is_over for rule in self._rules)

    def advance(self, token: int) -> bool:
        """Commit a token; False: the grammar does not go on with it."""
        taken = self._accept(token)
        self._history.clear()
        for rule in self._rules:
            rule.settle()
        return taken

    def write_masks(
        self,
        out: Masks,
        num_outputs: int,
        tokens: Sequence[int],
        parents: Sequence[int] | None,
        max_depth: int,
    ) -> None:
        """Of the nodes ``tokens``, the first of which is the last token committed.

        ``parents``: of a tree, parents first; None: a chain. Nodes that can't be accepted (the grammar
        forbids them, or they are deeper than ``max_depth``) have masks that allow everything: nothing depends
        on them.
        """
        out.fill(ANYTHING)
        children: list[list[int]] = [[] for _ in tokens]
        for node in range(1, len(tokens)):
            children[node - 1 if parents is None else parents[node]].append(node)
        self._walk(out, 0, num_outputs, tokens, children, max_depth)

    def _walk(
        self,
        masks: Masks,
        node: int,
        num_before: int,
        tokens: Sequence[int],
        children: list[list[int]],
        depth_left: int,
    ) -> None:
        if self.is_terminated:
            return
        self._fill(masks, node, num_before)
        for child in children[node] if depth_left else ():
            if self._accept(tokens[child]):
                self._walk(masks, child, num_before + 1, tokens, children, depth_left - 1)
                self._rollback()

    def _fill(self, masks: Masks, row: int, num_before: int) -> None:
        phase = Phase.OVER if self._reasoning is None else self._reasoning.phase
        if phase is not Phase.OPEN:
            self._matcher.fill(masks, row)
        if phase is Phase.UNDECIDED:
            assert self._reasoning is not None and self._reasoning.begin_id is not None
            allow(masks[row], self._reasoning.begin_id)
        for rule in self._rules:
            left = masks[row].copy()
            rule.restrict(left)
            if left.any():
                masks[row] = left
        if num_before < self._min_new_tokens:
            kept = masks[row] & self._unsuppressed
            if kept.any():
                masks[row] = kept
        if not masks[row].any():
            # Whatever is chosen now, ``advance`` refuses it; a row of nothing but -inf would be a fault.
            masks[row] = ANYTHING

    def _accept(self, token: int) -> bool:
        reasoning = self._reasoning
        before = None if reasoning is None else reasoning.state
        in_matcher = reasoning is None or not reasoning.takes(token)
        if in_matcher and not self._matcher.accept(token):
            if reasoning is not None and before is not None:
                reasoning.state = before
            return False
        self._history.append((before, in_matcher))
        for rule in self._rules:
            rule.take(token)
        return True

    def _rollback(self) -> None:
        before, in_matcher = self._history.pop()
        if in_matcher:
            self._matcher.rollback(1)
        if self._reasoning is not None and before is not None:
            self._reasoning.state = before
        for rule in self._rules:
            rule.undo()

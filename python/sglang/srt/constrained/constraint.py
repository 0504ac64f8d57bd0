"""The grammar of one request: how far its text has come, and the masks of what may follow.

One object from the request's beginning to its end. It moves on with the tokens that are committed, whatever
mode chose them; drafts are walked along and taken back.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sglang.srt.constrained.grammar import ANYTHING, Masks, Matcher
from sglang.srt.constrained.vocabulary import Vocabulary


class Reasoning:
    """The text before the grammar's: it ends with a marker, and anything may be in it.

    Bytes are compared, so that it does not matter how the marker is cut into tokens.
    """

    def __init__(self, marker: bytes, vocabulary: Vocabulary) -> None:
        self._marker = marker
        self._tokens = vocabulary.tokens
        self._tail = b""  # the end of the text, in which the marker may have begun
        self._tails: list[bytes] = []  # before each token accepted and not forgotten
        self.is_over = False

    def accept(self, token: int) -> None:
        """What a token has after the marker belongs to neither part."""
        self._tails.append(self._tail)
        text = self._tail + (self._tokens[token] if 0 <= token < len(self._tokens) else b"")
        self.is_over = self._marker in text
        self._tail = text[-(len(self._marker) - 1) :] if len(self._marker) > 1 else b""

    def rollback(self, count: int) -> None:
        if count:
            self._tail = self._tails[-count]
            del self._tails[-count:]
            self.is_over = False

    def forget(self) -> None:
        """What has been accepted stays."""
        self._tails.clear()


class Constraint:
    def __init__(
        self,
        matcher: Matcher,
        vocabulary: Vocabulary,
        min_new_tokens: int = 0,
        suppressed_ids: tuple[int, ...] = (),
        reasoning_end: str = "",
    ) -> None:
        """``suppressed_ids``: not before ``min_new_tokens``, unless nothing else may follow."""
        self._matcher = matcher
        self._min_new_tokens = min_new_tokens if suppressed_ids else 0
        self._unsuppressed = vocabulary.mask_without(suppressed_ids)  # [words]
        self._reasoning = Reasoning(reasoning_end.encode(), vocabulary) if reasoning_end else None
        self._num_words = vocabulary.num_words
        self._in_matcher: list[bool] = []  # of the tokens accepted and not forgotten: who took it

    @property
    def is_terminated(self) -> bool:
        return self._matcher.is_terminated

    @property
    def _is_free(self) -> bool:
        return self._reasoning is not None and not self._reasoning.is_over

    def advance(self, token: int) -> bool:
        """Commit a token; False: the grammar does not go on with it."""
        taken = self._accept(token)
        self._in_matcher.clear()
        if self._reasoning is not None:
            self._reasoning.forget()
        return taken

    def masks(
        self, num_outputs: int, tokens: Sequence[int], parents: Sequence[int] | None, max_depth: int
    ) -> Masks:
        """[N, words] of the nodes ``tokens``, the first of which is the last token committed.

        ``parents``: of a tree, parents first; None: a chain. Nodes that can't be accepted (the grammar
        forbids them, or they are deeper than ``max_depth``) have masks that allow everything: nothing depends
        on them.
        """
        masks = np.full((len(tokens), self._num_words), ANYTHING, np.int32)
        children: list[list[int]] = [[] for _ in tokens]
        for node in range(1, len(tokens)):
            children[node - 1 if parents is None else parents[node]].append(node)
        self._walk(masks, 0, num_outputs, tokens, children, max_depth)
        return masks

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
        if not self._is_free:
            self._matcher.fill(masks, row)
        if num_before < self._min_new_tokens:
            kept = masks[row] & self._unsuppressed
            if kept.any():
                masks[row] = kept
        if not masks[row].any():
            # Whatever is chosen now, ``advance`` refuses it; a row of nothing but -inf would be a fault.
            masks[row] = ANYTHING

    def _accept(self, token: int) -> bool:
        if self._is_free:
            assert self._reasoning is not None
            self._reasoning.accept(token)
            self._in_matcher.append(False)
            return True
        if not self._matcher.accept(token):
            return False
        self._in_matcher.append(True)
        return True

    def _rollback(self) -> None:
        if self._in_matcher.pop():
            self._matcher.rollback(1)
        else:
            assert self._reasoning is not None
            self._reasoning.rollback(1)

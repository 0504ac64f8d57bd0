"""Masked decode steps as CUDA graphs: two for each size, with the host between them.

The first ends where choosing begins; what it leaves (the nodes, the target's hidden states) stays where it
is until the second has read it, since nothing else is replayed between the two. They are fewer than those of
other steps: powers of two, so that a server that may get grammars does not start twice as slowly.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from sglang.srt.model_executor.decode_step import StepStart
from sglang.srt.model_executor.graph_sizes import GraphKey, GraphSizes
from sglang.srt.model_executor.results import BegunStep, DraftNodes, Executed
from sglang.srt.model_executor.step_graphs import Capture, DeviceStep, Replay, drafts_of, executed
from sglang.srt.model_executor.step_plan import PAD_SLOT, SpecShape, StepMidInput
from sglang.srt.model_executor.step_trace import StepDone
from sglang.srt.sampling.kernel_sampler import NodeMasks
from sglang.srt.sampling.rows import mask_words
from sglang.srt.utils.upload import upload_array, upload_into

logger = logging.getLogger(__name__)


def split_sizes(sizes: GraphSizes) -> GraphSizes:
    """Powers of two, and the largest of each set."""
    return GraphSizes(
        {
            draft_len: sorted({of[-1], *(1 << n for n in range(of[-1].bit_length()) if 1 << n < of[-1])})
            for draft_len, of in sizes.by_draft_len.items()
        },
        pad=True,
    )


@dataclass(frozen=True, slots=True)
class _Pair:
    first: Callable[[], torch.Tensor]  # a speculative step's nodes: [1 or 2, R, N] tokens, tree's parents
    rest: Replay


class SplitGraphs:
    def __init__(
        self,
        step: DeviceStep,
        capture: Capture,
        sizes: GraphSizes,
        spec: SpecShape | None,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.sizes = sizes
        self._step = step
        self._capture = capture
        self._spec = spec
        self._num_words = -(-vocab_size // 32)
        self._pairs: dict[GraphKey, _Pair] = {}
        self._slots = torch.zeros(sizes.max_rows, dtype=torch.int64, device=device)  # [max rows]
        self._which = torch.full((sizes.max_rows,), -1, dtype=torch.int32, device=device)  # [max rows]
        num_nodes = max(key.rows * self._nodes(key) for key in sizes.capture_order(spec))
        # Every key's [rows, nodes, words]; a step fills its beginning.
        self._bits = torch.zeros(num_nodes * self._num_words, dtype=torch.int32, device=device)

    @property
    def num_graphs(self) -> int:
        return 2 * len(self.sizes.capture_order(self._spec))

    @torch.inference_mode()
    def capture_all(self) -> None:
        began, used = time.perf_counter(), self._capture.used_bytes()
        for key in self.sizes.capture_order(self._spec):
            self.capture_key(key)
        logger.info(
            "CUDA graphs of steps with grammars: %d, %.1f s, %.0f MiB",
            self.num_graphs, time.perf_counter() - began, (self._capture.used_bytes() - used) / 2**20,
        )  # fmt: skip

    @torch.inference_mode()
    def capture_key(self, key: GraphKey) -> None:
        slots, allowed = self._slots[: key.rows], self._allowed(key)
        self._step.finish(self._step.begin(slots, key.draft_len), allowed)  # loads kernels, fills caches
        held: list[StepStart] = []

        def first() -> torch.Tensor:
            held[:] = [self._step.begin(slots, key.draft_len)]
            drafts = drafts_of(held[0])
            if drafts is None:
                return slots
            return torch.stack(
                (drafts.tokens,) if drafts.parents is None else (drafts.tokens, drafts.parents)
            )

        begin = self._capture.capture(first)
        rest = self._capture.capture(lambda: self._step.finish(held[0], allowed), StepDone.lent)
        self._capture.let_go(held)
        begin()
        rest()
        self._pairs[key] = _Pair(begin, rest)

    def begin(self, slots_cpu: Sequence[int], draft_len: int) -> BegunStep | None:
        num_rows = len(slots_cpu)
        key = self.sizes.covering(draft_len, num_rows)
        if key is None:
            return None
        upload_into(self._slots[: key.rows], [*slots_cpu, *[PAD_SLOT] * (key.rows - num_rows)])
        nodes, drafts = self._pairs[key].first(), None
        if draft_len:
            of_rows = nodes[:, :num_rows]
            drafts = DraftNodes(of_rows[0], of_rows[1] if len(nodes) == 2 else None)
        return BegunStep(drafts, partial(self._finish, key, num_rows))

    def _finish(self, key: GraphKey, num_rows: int, masks: StepMidInput) -> Executed:
        assert not masks.rows or masks.num_nodes == self._nodes(key)
        which = [-1] * key.rows
        for place, row in enumerate(masks.rows):
            which[row] = place
        upload_into(self._which[: key.rows], which)
        words = mask_words(masks)
        self._bits[: len(words)].copy_(upload_array(words, self._bits.device))
        return executed(self._pairs[key].rest(), num_rows, used_graph=True)

    def _nodes(self, key: GraphKey) -> int:
        return self._spec.num_nodes(key.draft_len) if self._spec else 1

    def _allowed(self, key: GraphKey) -> NodeMasks:
        shape = (key.rows, self._nodes(key), self._num_words)
        return NodeMasks(self._which[: key.rows], self._bits[: key.rows * shape[1] * shape[2]].view(shape))

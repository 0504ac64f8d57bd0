"""Decode steps as CUDA graphs: one for each (draft length, rows), replayed with other slot ids.

Everything a step needs beside the slot ids is on the device, so the ids are the only input. Graphs
share one memory pool: no two run at a time, so the larger ones' memory serves the smaller ones.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from tqdm import tqdm

from sgl_kernel.speculation.ragged.ops import QueryLens
from sglang.srt.model_executor.decode_step import StepStart
from sglang.srt.model_executor.graph_sizes import GraphKey, GraphSizes, spread
from sglang.srt.model_executor.results import BegunStep, DraftNodes, Executed
from sglang.srt.model_executor.step_plan import PAD_SLOT, GraphSet, SpecShape, StepMidInput
from sglang.srt.model_executor.step_trace import StepDone
from sglang.srt.sampling.kernel_sampler import NodeMasks
from sglang.srt.sampling.logit_edits import LogitEditors
from sglang.srt.sampling.rows import choice_masks
from sglang.srt.utils.upload import upload, upload_into

logger = logging.getLogger(__name__)

Replay = Callable[[], StepDone]
CompileAhead = Callable[[int], AbstractContextManager[None]]
"""Within it ops only compile their kernels; the number is that of compiling threads."""


T = TypeVar("T")


def same(captured: T) -> T:
    """Lends nothing."""
    return captured


class DeviceStep(Protocol):
    """A decode step without anything of the host in it, or nothing but masks (``DecodeStep``)."""

    def run(self, slots: torch.Tensor, draft_len: int, query_lens: QueryLens | None = None) -> StepDone:
        """slots: [R] int64 on the device, PAD_SLOT in padded rows."""
        ...

    def begin(self, slots: torch.Tensor, draft_len: int) -> StepStart:
        """The first part of ``run``, up to the choices."""
        ...

    def finish(
        self,
        start: StepStart,
        allowed: NodeMasks | None = None,
        edit: Callable[[torch.Tensor], None] | None = None,
    ) -> StepDone:
        """The rest of it; ``edit`` changes the logits."""
        ...


class Capture(Protocol):
    """Turns launches into graphs; all of one capture's graphs share their memory."""

    def capture(self, step: Callable[[], T], lend: Callable[[T], T] = same) -> Callable[[], T]:
        """The launches of ``step``; a replay returns the same tensors every time, of which ``lend`` gives up
        owning those that only the step itself needs, and who reads them before another replay."""
        ...

    def trace(self, steps: Callable[[], None]) -> None:
        """Only the host's side of ``steps``: nothing that they launch is run."""
        ...

    def let_go(self, held: list[StepStart]) -> None:
        """Captures are done that read what is ``held``: a graph needs its address alone."""
        ...

    def used_bytes(self) -> int:
        """Memory in use on the device, by whomever."""
        ...


class CudaCapture:
    """On the current stream of the thread, which is the one that replays (not the default stream)."""

    def __init__(self, device: torch.device) -> None:
        assert torch.cuda.current_stream(device) != torch.cuda.default_stream(device)
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, step: Callable[[], T], lend: Callable[[T], T] = same) -> Callable[[], T]:
        graph = torch.cuda.CUDAGraph()
        with self._recording(graph, self._pool):
            captured = step()
        output = lend(captured)
        del captured

        def replay() -> T:
            graph.replay()
            return output

        return replay

    def trace(self, steps: Callable[[], None]) -> None:
        # The graph and its pool are dropped at once.
        with self._recording(torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()):
            steps()

    def let_go(self, held: list[StepStart]) -> None:
        held.clear()

    def used_bytes(self) -> int:
        torch.cuda.empty_cache()  # what only waits to be used again is not in use
        free, total = torch.cuda.mem_get_info(self._device)
        return int(total - free)

    def _recording(self, graph: torch.cuda.CUDAGraph, pool: Any) -> AbstractContextManager[None]:
        # thread_local: the thread that waits for results may use CUDA meanwhile.
        recording: AbstractContextManager[None] = torch.cuda.graph(
            graph,
            pool=pool,
            stream=torch.cuda.current_stream(self._device),
            capture_error_mode="thread_local",
        )
        return recording


class StepGraphs:
    """The graphs of one ``DeviceStep`` and their only input: slot ids, and how many tokens rows verify."""

    def __init__(
        self,
        step: DeviceStep,
        capture: Capture,
        sizes: GraphSizes,
        spec: SpecShape | None,
        device: torch.device,
    ) -> None:
        self.sizes = sizes
        self._step = step
        self._capture = capture
        self._spec = spec
        self._replays: dict[GraphKey, Replay] = {}
        # [max rows] int64: a graph of R rows reads the first R. Pad slots until a step comes.
        self._slots = torch.zeros(sizes.max_rows, dtype=torch.int64, device=device)
        self._held_cpu = [PAD_SLOT] * sizes.max_rows  # what is in it, or on its way there
        self._lens = torch.ones(sizes.max_rows if sizes.ragged else 0, dtype=torch.int64, device=device)
        self._held_lens: list[int] = []  # the first ones of it

    @torch.inference_mode()
    def compile_ahead(self, compile_ahead: CompileAhead) -> None:
        """Compile the kernels of all keys, many at a time.

        What an op returns meanwhile was never written: a token id may be anything, and a lookup of it
        would end the process. So the ops that are not compiled ahead must not run either: ``trace``.
        """
        began = time.perf_counter()
        with compile_ahead(min(32, os.cpu_count() or 1)):
            self._capture.trace(self.run_all)
        logger.info("kernels of decode steps: compiled in %.1f s", time.perf_counter() - began)

    @torch.inference_mode()
    def run_all(self) -> None:
        """What every key launches, of pad slots; only to be traced: rows' numbers of tokens are not set."""
        for key in self.sizes.capture_order(self._spec):
            self._run(key)

    @torch.inference_mode()
    def capture_all(self) -> tuple[GraphSet, ...]:
        """Capture every key, each after one eager run (of pad slots, which changes no state)."""
        order = self.sizes.capture_order(self._spec)
        seconds = dict.fromkeys(self.sizes.by_draft_len, 0.0)
        num_bytes = dict.fromkeys(self.sizes.by_draft_len, 0)
        bar = tqdm(order, desc="Capturing CUDA graphs", disable=None)  # None: only on a terminal
        for key in bar:
            verified = f", {key.tokens} tokens" if key.tokens else ""
            bar.set_postfix_str(f"draft_len {key.draft_len}, {key.rows} rows{verified}")
            began, used = time.perf_counter(), self._capture.used_bytes()
            self.capture_key(key)
            seconds[key.draft_len] += time.perf_counter() - began
            num_bytes[key.draft_len] += self._capture.used_bytes() - used
        sets = tuple(
            GraphSet(
                draft_len, sizes, seconds[draft_len], num_bytes[draft_len], self.sizes.ragged_of(draft_len)
            )
            for draft_len, sizes in self.sizes.by_draft_len.items()
        )
        for graphs in sets:
            logger.info(
                "CUDA graphs, %s: %d (%d to %d rows)%s, %.1f s, %.0f MiB",
                f"spec(k={graphs.draft_len})" if graphs.draft_len else "plain",
                len(graphs.sizes), graphs.sizes[0], graphs.sizes[-1],
                f" and {len(graphs.ragged)} ragged" if graphs.ragged else "",
                graphs.seconds, graphs.bytes / 2**20,
            )  # fmt: skip
        return sets

    @torch.inference_mode()
    def capture_key(self, key: GraphKey) -> None:
        if key.tokens:
            self._put_lens(spread(key.tokens, key.rows))
        self._run(key)  # loads kernels and fills caches, which a capture can't
        replay = self._capture.capture(lambda: self._run(key), StepDone.lent)
        replay()  # a graph's first launch loads it onto the device: no request should wait for that
        self._replays[key] = replay

    def run(
        self, slots_cpu: Sequence[int], draft_len: int, row_drafts: Sequence[int] = ()
    ) -> StepDone | None:
        """Good until the next run, padded rows at its end; None if no graph covers the step.

        row_drafts: how many of its drafts each row verifies; none: all.
        """
        num_rows, num_tokens = len(slots_cpu), sum(row_drafts) + len(row_drafts)
        if row_drafts:
            key = self.sizes.covering_ragged(draft_len, num_rows, num_tokens)
        else:
            key = self.sizes.covering(draft_len, num_rows)
        if key is None:
            return None
        num_padded = key.rows - num_rows
        self._put([*slots_cpu, *[PAD_SLOT] * num_padded])
        if row_drafts:
            of_padded = spread(key.tokens - num_tokens, num_padded) if num_padded else []
            self._put_lens([*(drafts + 1 for drafts in row_drafts), *of_padded])
        return self._replays[key]()

    def _run(self, key: GraphKey) -> StepDone:
        slots = self._slots[: key.rows]
        if not key.tokens:
            return self._step.run(slots, key.draft_len)
        return self._step.run(slots, key.draft_len, QueryLens(self._lens[: key.rows], key.tokens))

    def _put(self, slots_cpu: list[int]) -> None:
        """The batch is the same in most steps: then there is nothing to upload."""
        num_rows = len(slots_cpu)
        if self._held_cpu[:num_rows] != slots_cpu:
            upload_into(self._slots[:num_rows], slots_cpu)
            self._held_cpu[:num_rows] = slots_cpu

    def _put_lens(self, lens: list[int]) -> None:
        if self._held_lens[: len(lens)] != lens:
            upload_into(self._lens[: len(lens)], lens)
            self._held_lens[: len(lens)] = lens


class SplitSteps(Protocol):
    """Masked steps as graphs (``SplitGraphs``)."""

    def begin(self, slots_cpu: Sequence[int], draft_len: int) -> BegunStep | None:
        """None: no graph covers the step."""
        ...


class DecodeSteps:
    """Decode steps on a device with graphs: a replay where a graph covers the step, else eager."""

    def __init__(
        self,
        step: DeviceStep,
        graphs: StepGraphs | None,
        device: torch.device,
        split: SplitSteps | None = None,
    ) -> None:
        """``graphs`` None: --disable-cuda-graph; ``split``: of masked steps."""
        self.step = step
        self._graphs = graphs
        self._device = device
        self._split = split

    def run(self, slots_cpu: Sequence[int], draft_len: int, row_drafts: Sequence[int] = ()) -> Executed:
        """row_drafts: how many of the ``draft_len`` drafts each row verifies; none: all."""
        if self._graphs is not None:
            done = self._graphs.run(slots_cpu, draft_len, row_drafts)
            if done is not None:
                return executed(done, len(slots_cpu), used_graph=True)
        slots = upload(slots_cpu, torch.int64, self._device)
        if not row_drafts:
            return executed(self.step.run(slots, draft_len), len(slots_cpu), used_graph=False)
        lens = [drafts + 1 for drafts in row_drafts]
        given = QueryLens(upload(lens, torch.int64, self._device), sum(lens))
        return executed(self.step.run(slots, draft_len, given), len(slots_cpu), used_graph=False)

    def begin(
        self, slots_cpu: Sequence[int], draft_len: int, editors: LogitEditors | None = None
    ) -> BegunStep:
        """A masked step, up to its choices. ``editors``: a row's logits are changed, which no graph does."""
        if self._split is not None and editors is None:
            begun = self._split.begin(slots_cpu, draft_len)
            if begun is not None:
                return begun
        slots = upload(slots_cpu, torch.int64, self._device)
        start = self.step.begin(slots, draft_len)

        def finish(masks: StepMidInput) -> Executed:
            allowed = None
            if masks.rows:
                allowed = NodeMasks.of(choice_masks(masks, self._device), len(slots_cpu))
            edit = None
            if editors is not None and masks.edits:
                num_nodes = start.tree.tokens.shape[1]
                first_lines = {row: row * num_nodes for row in range(len(slots_cpu))}
                edit = partial(editors.apply, masks.edits, first_lines=first_lines)
            return executed(self.step.finish(start, allowed, edit), len(slots_cpu), used_graph=False)

        return BegunStep(drafts_of(start), finish)


def executed(done: StepDone, num_rows: int, used_graph: bool) -> Executed:
    """Without the padded rows."""
    return Executed(done.packed[:num_rows], used_graph, done.trace)


def drafts_of(start: StepStart) -> DraftNodes | None:
    if not start.draft_len:
        return None
    tree = start.tree
    return DraftNodes(tree.tokens, None if tree.mask is None else tree.parents)

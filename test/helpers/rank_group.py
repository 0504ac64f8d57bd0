"""Several ranks of one model in one process, a thread each, that talk through Gloo."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch.distributed as dist

from sglang.srt.configs.executor_args import ExecutorArgs
from sglang.srt.distributed.collectives import Collectives, open_gloo
from sglang.srt.distributed.tensor_parallel import TensorParallel
from sglang.srt.managers.executor_build import build_worker
from sglang.srt.model_executor.executor import PendingStep
from sglang.srt.model_executor.in_process_executor import InProcessExecutor
from sglang.srt.model_executor.step_plan import ExecutorInfo, StepPlan, StepResult
from sglang.srt.model_executor.worker import Worker

Wrap = Callable[[Collectives, int], Collectives]


@dataclass(frozen=True, slots=True)
class _OfAll:
    pending: list[PendingStep]

    def wait(self) -> StepResult:
        """The first rank's result; all must have the same."""
        results = [pending.wait() for pending in self.pending]
        for rank, result in enumerate(results):
            assert result.tokens == results[0].tokens, (
                f"rank {rank}: {result.tokens}, not {results[0].tokens}"
            )
            assert result.faults == results[0].faults
        return results[0]


class RankGroup:
    """An ``Executor`` of ``args.tp_size`` ranks, each of which gets every plan."""

    def __init__(
        self,
        args: ExecutorArgs,
        wrap: Wrap = lambda collectives, rank: collectives,
        build: Callable[[ExecutorArgs, TensorParallel], tuple[Worker, ExecutorInfo]] = build_worker,
    ) -> None:
        size, store = args.tp_size, dist.HashStore()

        def start(rank: int) -> InProcessExecutor:
            def assemble():  # type: ignore[no-untyped-def]
                collectives = wrap(open_gloo(store, rank, size), rank)
                return build(args, TensorParallel(rank, size, collectives))

            return InProcessExecutor(assemble)

        with ThreadPoolExecutor(size) as threads:
            self.ranks = list(threads.map(start, range(size)))
        self.worker = self.ranks[0].worker

    @property
    def info(self) -> ExecutorInfo:
        infos = [replace(rank.info, weight_bytes=0) for rank in self.ranks]
        assert all(info == infos[0] for info in infos), infos
        return self.ranks[0].info

    def launch(self, plan: StepPlan) -> _OfAll:
        return _OfAll([rank.launch(plan) for rank in self.ranks])

    def shutdown(self) -> None:
        for rank in self.ranks:
            rank.shutdown()

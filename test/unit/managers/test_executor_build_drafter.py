"""Which drafter an executor gets, and what is refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny_executor import draft_folder, target_folder, tiny_executor
from helpers.tiny_models import write_tiny_llama

from sglang.srt.configs.executor_args import ExecutorArgs
from sglang.srt.configs.model_config import ModelConfigError
from sglang.srt.managers.executor_build_models import load_models
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from sglang.srt.speculative.ngram_worker import NgramWorker
from sglang.srt.speculative.standalone_worker import StandaloneWorker


def args(family: str, folder: Path | None, **given: Any) -> ExecutorArgs:
    sizes = {"num_steps": 3, "topk": 1, "num_draft_tokens": 4, "context_length": 64}
    draft = None if folder is None else str(folder)
    return ExecutorArgs(str(target_folder(family)), draft, **(sizes | given))


@pytest.mark.parametrize(
    "family,drafter,worker,num_pools",
    [
        ("llama", "eagle3", EAGLEWorkerV2, 2),
        ("glm-5", "nextn", EAGLEWorkerV2, 2),
        ("llama", "standalone", StandaloneWorker, 2),
        ("llama", "ngram", NgramWorker, 1),
    ],
)
def test_each_kind(family: str, drafter: str, worker: type, num_pools: int) -> None:
    executor = tiny_executor((3, 1, 4), family, drafter=drafter, max_total_tokens=64)
    plain = tiny_executor(None, family, max_total_tokens=64)
    assert isinstance(executor.worker.drafter, worker) and len(executor.worker.pools) == num_pools
    assert executor.info.wants_ids == (drafter in ("standalone", "ngram"))
    more = executor.info.weight_bytes - plain.info.weight_bytes
    assert more == 0 if drafter == "ngram" else more > 0
    assert executor.info.kv_bytes - plain.info.kv_bytes == sum(p.bytes for p in executor.worker.pools[1:])


def test_what_does_not_fit_together(tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    other = write_tiny_llama(tmp_path, vocab_size=300)
    with pytest.raises(ModelConfigError, match="a vocabulary of 300 ids and the target one of 256"):
        load_models(args("llama", other, draft_kind="STANDALONE"), cpu)
    with pytest.raises(ModelConfigError, match="an EAGLE-3 drafter: use --speculative-algorithm EAGLE3"):
        load_models(args("glm-5", draft_folder("glm-5"), draft_kind="NEXTN"), cpu)
    with pytest.raises(ModelConfigError, match="drafts chains alone: topk must be 1"):
        load_models(args("llama", None, draft_kind="NGRAM", topk=2, num_draft_tokens=6), cpu)

"""One conversion by two processes at once, and transformers' own reading of the same file."""

import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from sglang.embedded.gguf_source import find_gguf_file
from sglang.embedded.model import EMBEDDED_MODEL_NAME


@dataclass(frozen=True, slots=True)
class Conversion:
    """What came of two processes that asked for the model at the same time."""

    cache: Path
    folder: Path
    logs: list[str]  # stderr of each process
    outputs: list[str]  # stdout of each process


@pytest.fixture(scope="session")
def conversion(tmp_path_factory: pytest.TempPathFactory) -> Conversion:
    cache = tmp_path_factory.mktemp("cache")
    env = os.environ | {"SGLANG_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "sglang.embedded.prepare"]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True) for _ in range(2)]
    results = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results
    (folder,) = cache.glob(f"*/{EMBEDDED_MODEL_NAME}")
    return Conversion(cache, folder, [err for _, err in results], [out for out, _ in results])


@pytest.fixture(scope="session")
def parsed_once() -> Iterator[None]:
    """Let transformers parse the file once a session instead of six times (saves half a minute, no more)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", functools.lru_cache(gguf.GGUFReader))
        patch.setattr(gguf, "get_tensor_name_map", functools.lru_cache(gguf.get_tensor_name_map))
        yield


@pytest.fixture(scope="session")
def reference_tokenizer(parsed_once: None) -> PreTrainedTokenizerBase:
    path = find_gguf_file()
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.fixture(scope="session")
def reference_weights(parsed_once: None) -> dict[str, torch.Tensor]:
    path = find_gguf_file()
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return dict(model.named_parameters())

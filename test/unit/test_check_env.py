"""What ``python -m sglang.check_env`` tells. Run alone: pytest THIS_FILE"""

from __future__ import annotations

from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch

from sglang import check_env


def test_versions_and_the_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {
        "lscpu": "Architecture: x\nHypervisor vendor:   KVM\n",
        "nvidia-smi": "\x1b[4mGPU0 NV18\x1b[0m\n",
    }
    monkeypatch.setattr(check_env, "_output", lambda *command: answers.get(command[0]))
    assert check_env.main([]) == 0
    head, _, rest = capsys.readouterr().out.partition("NVIDIA Topology: \n")
    told = dict(line.split(": ", 1) for line in head.splitlines())
    assert told["numpy"] == version("numpy") and told["PyTorch"].startswith(torch.__version__)
    assert told["sglang-toggle"] == version("sglang-toggle") and told["flashinfer-jit-cache"]
    assert told["Hypervisor vendor"] == "KVM" and told["CPU"].endswith("usable")
    assert rest.splitlines()[0] == "GPU0 NV18" and "ulimit soft: " in rest


def test_equal_gpus_are_told_once() -> None:
    gpus = [SimpleNamespace(name=n, total_memory=96 * 2**30, major=12, minor=0) for n in ("a", "b", "a")]
    assert list(check_env.gpu_lines(gpus)) == [
        ("GPU 0,2", "a, 96.0 GiB, compute capability 12.0"),
        ("GPU 1", "b, 96.0 GiB, compute capability 12.0"),
    ]


def test_a_machine_that_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert check_env._output("nvidia-smi", "topo", "-m") is None and check_env._read("/nowhere") == ""
    monkeypatch.setattr(check_env, "_read", lambda path: "")
    told = dict(check_env.environment())
    assert "NVIDIA Topology" not in told and "Memory" not in told and told["CPU"]


def test_two_packages_of_one_name_are_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_env, "upstream_conflict", lambda: "both are installed")
    assert check_env.main([]) == 1
    assert "error: both are installed" in capsys.readouterr().err

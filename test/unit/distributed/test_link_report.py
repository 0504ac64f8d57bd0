"""What the server makes of a look at the GPUs' links. The look itself is faked: it needs GPUs.

Run alone: pytest THIS_FILE
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch

from sglang.srt.configs.executor_args import ExecutorArgs
from sglang.srt.distributed import link_check, link_report
from sglang.srt.distributed.link_report import (
    LinkCheckConfig,
    LinkReport,
    check_links,
    read_report,
    write_report,
)
from sglang.srt.managers import executor_start
from sglang.srt.managers.executor_start import by_links
from sglang.srt.model_executor.multi_process_executor import WorkerError

ARGS = ExecutorArgs("model", device="cuda", tp_size=4)
GOOD = LinkReport(gpus=4, copies=True, pushes=True, slowest_gbs=50.0)

LOOK = """
import sys, time
from pathlib import Path
import msgspec
from sglang.srt.distributed.link_report import LinkCheckConfig, LinkReport, write_report
from sglang.srt.utils.child_process import read_config

config = msgspec.msgpack.decode(read_config(), type=LinkCheckConfig)
write_report(Path(config.file), LinkReport(gpus=config.size, copies=True, doing="sums over GPUs"))
{then}
"""


def look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str) -> LinkReport:
    (tmp_path / "faked_look.py").write_text(LOOK.format(then=then))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return check_links(2, pushes=True, limit_s=3.0, module="faked_look")


def test_a_look_that_hangs_is_ended_and_what_it_found_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = time.monotonic()
    report = look(tmp_path, monkeypatch, "time.sleep(60)")
    assert time.monotonic() - began < 6.0
    assert report.copies and not report.pushes and report.gpus == 2
    assert report.why == "the check had not ended after 3 s (sums over GPUs)"


def test_a_look_that_dies_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = look(tmp_path, monkeypatch, "sys.exit(3)")
    assert report.copies and not report.pushes
    assert report.why == "the check ended with 3 (sums over GPUs)"


def test_a_report_is_there_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    assert read_report(tmp_path / "report") == LinkReport()
    write_report(tmp_path / "report", GOOD)
    assert read_report(tmp_path / "report") == GOOD and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "report, pushes, off_links, says",
    [
        (GOOD, True, False, "tried in 0.0 s; a copy of 8 MiB between two, the slowest: 50.0 GB/s"),
        (
            LinkReport(gpus=4, copies=True, why="it hung"),
            False,
            False,
            "can't use them (it hung); sums by NCCL",
        ),
        (LinkReport(gpus=4, why="came out wrong"), False, True, "came out wrong; they are not used"),
        (
            LinkReport(gpus=4, reachable=False, why="no way"),
            False,
            False,
            "no way; NCCL goes the way it finds",
        ),
    ],
)
def test_what_was_found_decides(
    report: LinkReport,
    pushes: bool,
    off_links: bool,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(executor_start, "check_links", lambda size, pushes: report)
    caplog.set_level("INFO")
    args, environ = by_links(ARGS, {})
    assert args.disable_custom_all_reduce != pushes
    assert (environ.get("NCCL_P2P_DISABLE") == "1") == off_links
    assert says in caplog.records[-1].getMessage()


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Of which each is the host's memory."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda here, there: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(link_check, "_COPIED", 1000)
    return [torch.device("cpu", index) for index in range(2)]


def test_every_copy_is_compared(two_devices: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    done = []

    def copy(sent: torch.Tensor, arrived: torch.Tensor) -> float:
        done.append(arrived)
        arrived.copy_(sent if len(done) != broken else torch.zeros_like(sent))
        return 4e-6

    monkeypatch.setattr(link_check, "_timed_copy", copy)
    broken = 0
    assert link_check.copy_all(two_devices) == ("", pytest.approx(1.0))
    assert len(done) == 2 and not torch.equal(*done), "each pair has a pattern of its own"
    broken, done = 2, []
    assert link_check.copy_all(two_devices)[0] == "a copy from GPU 1 to GPU 0 came out wrong"


def test_the_report_says_how_far_the_look_got(
    two_devices: list[torch.device], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = LinkCheckConfig(2, True, False, str(tmp_path / "report"))
    monkeypatch.setattr(link_check, "copy_all", lambda devices: ("", 25.0))
    monkeypatch.setattr(link_check, "sum_all", lambda devices: "")
    assert link_check.look(config) == LinkReport(
        gpus=2, copies=True, pushes=True, doing="sums over GPUs", slowest_gbs=25.0
    )
    assert read_report(tmp_path / "report").copies, "written before the sums are tried"
    monkeypatch.setattr(link_check, "sum_all", lambda devices: "wrong")
    assert (link_check.look(config).pushes, link_check.look(config).why) == (False, "wrong")
    monkeypatch.setattr(link_check, "copy_all", lambda devices: ("wrong", 0.0))
    assert not link_check.look(config).copies
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda here, there: False)
    assert link_check.look(config).why == "GPU 0 can't reach the memory of GPU 1"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert link_check.look(config).why == "there are 1 GPUs"


def test_links_that_the_user_has_switched_off_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_start, "check_links", lambda size, pushes: pytest.fail("tried"))
    args, _ = by_links(ARGS, {"NCCL_P2P_DISABLE": "1"})
    assert args.disable_custom_all_reduce and not args.fuse_all_reduce


def test_fewer_gpus_than_ranks_are_the_users_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_start, "check_links", lambda size, pushes: LinkReport(gpus=2, why="x"))
    with pytest.raises(WorkerError, match="--tp-size 4: there are 2 GPUs here; use a smaller one"):
        by_links(ARGS, {})


def test_the_report_needs_no_torch() -> None:
    import subprocess

    code = f"import sys, {link_report.__name__}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

"""Bodies in Triton's interpreter: each has a process of its own, and its failure is the test's."""

from __future__ import annotations

import os
import sys

import pytest

pytest.importorskip("triton", reason="kernels need triton")

import torch
import triton
import triton.language as tl

from sgl_kernel.testing.interpret import interpret


def body_interprets(size: int, environ: str) -> None:
    @triton.jit
    def double(x, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.arange(0, SIZE)
        tl.store(x + at, tl.load(x + at) * 2)

    x = torch.arange(size)
    double[(1,)](x, SIZE=size)
    assert x.tolist() == list(range(0, 2 * size, 2))
    assert os.environ["OF_A_TEST"] == environ and torch.get_num_threads() == 1


def body_ends(how: str) -> None:
    print("as far as here")
    torch.left_by_another = True
    sys.path.clear()
    if how == "a false claim":
        raise AssertionError("of the body")
    if how == "a skip":
        pytest.skip("of the body")
    os._exit(7)


def body_finds_nothing_left() -> None:
    assert not hasattr(torch, "left_by_another") and sys.path


def test_kernels_run_with_arguments_and_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("first", "second"):
        monkeypatch.setenv("OF_A_TEST", value)
        interpret(__file__, "body_interprets", size=8, environ=value)


@pytest.mark.parametrize("how", ["a false claim", "a skip", "a status"])
def test_every_other_end_fails_with_the_output_and_leaves_nothing(how: str) -> None:
    with pytest.raises(AssertionError, match="as far as here") as raised:
        interpret(__file__, "body_ends", how=how)
    assert ("of the body" in str(raised.value)) == (how != "a status")
    interpret(__file__, "body_finds_nothing_left")


@pytest.mark.long  # whoever comes next waits for torch again
def test_an_interrupted_body_is_ended() -> None:
    """As by a limit of time; whoever comes next has another process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("json.dumps", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            interpret(__file__, "body_finds_nothing_left")
    interpret(__file__, "body_finds_nothing_left")


def _interrupt(*_: object) -> str:
    raise KeyboardInterrupt

"""Run a test body in a process of its own in which Triton's interpreter carries out kernels on the CPU.

``@triton.jit`` reads TRITON_INTERPRET when it is imported, so a process is in one mode for good. A
body is a module-level function of the test file whose arguments JSON can hold; it asserts by itself.

Importing torch costs seconds. One process, started by the first body, imports it and forks for each body;
it ends with the process of the tests, whose end of the pipe closes then.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from functools import cache
from pathlib import Path
from typing import Any, Final

_COMMAND: Final = (sys.executable, "-u", "-m", "sgl_kernel.testing.interpret")
_IMPORTED_ONCE: Final = ("torch", "triton", "triton.language", "pytest", "hypothesis.strategies")


def interpret(file: str | Path, body: str, **arguments: Any) -> None:
    """Call ``body(**arguments)`` of the module in ``file``; AssertionError with its output if it fails."""
    job = {"file": str(file), "body": body, "arguments": arguments, "path": sys.path, "environ": _environ()}
    parent = _parent()
    assert parent.stdin is not None and parent.stdout is not None
    try:
        parent.stdin.write(json.dumps(job) + "\n")
        parent.stdin.flush()
        answer = parent.stdout.readline()
    except BaseException:  # a limit of time, an interrupt: the next body has another parent
        os.killpg(parent.pid, signal.SIGKILL)
        _parent.cache_clear()
        raise
    assert answer, f"the process that forks for bodies has ended: {parent.wait()}"
    done = json.loads(answer)
    assert done["code"] == 0, f"{body}({arguments}): {done['code']}\n{done['output'][-8000:]}"


def _environ() -> dict[str, str]:
    path = os.pathsep.join(p for p in sys.path if p)
    return {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


@cache
def _parent() -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(_COMMAND, env=_environ(), stdin=pipe, stdout=pipe, text=True, process_group=0)


def _serve() -> None:
    """A job a line, an answer a line; what a body or an import prints is no answer."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in _IMPORTED_ONCE:
        if importlib.util.find_spec(name.partition(".")[0]):
            importlib.import_module(name)
    for line in sys.stdin:
        with tempfile.TemporaryFile() as output:
            child = os.fork()
            if not child:
                _carry_out(json.loads(line), output.fileno())
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            output.seek(0)
            told = output.read().decode(errors="replace")
        answers.write(json.dumps({"code": code, "output": told}) + "\n")
        answers.flush()


def _carry_out(job: dict[str, Any], output: int) -> None:
    """In the child, of which nothing but its output and its status comes back."""
    code = 1
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.clear()
        os.environ.update(job["environ"])
        sys.path[:] = job["path"]
        _call(job["file"], job["body"], job["arguments"])
        code = 0
    except BaseException:  # a body may end in any way
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _call(file: str, body: str, arguments: dict[str, Any]) -> None:
    import torch

    assert os.environ.get("TRITON_INTERPRET") == "1"
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("interpreted_body", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    getattr(module, body)(**arguments)


if __name__ == "__main__":
    _serve()

"""schemathesis on the OpenAPI that a server serves: python scripts/fuzz_api.py [--seconds 600]

Requests made from the schema and against it, of every public endpoint. A 5xx, a status, content type or error
shape that the schema doesn't name, or a traceback in the server's log fails it. `make fuzz-api` installs what
it needs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from sglang.benchmark.server_info import ServerProblem
from sglang.benchmark.server_process import free_port, running_server

ROOT: Final = Path(__file__).resolve().parents[1]
# Short answers, so that many requests are made; a server that waits for /continue_generation answers none.
_SERVER: Final = ("--context-length", "96", "--enable-metrics", "--log-level", "warning")
_LEFT_OUT: Final = ("/pause_generation",)
_CHECKS: Final = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)


def main() -> int:
    options = _options()
    with tempfile.TemporaryDirectory(prefix="fuzz") as folder:
        log = Path(folder) / "server.log"
        code = _fuzz_server(options, log)
        told = log.read_text(errors="replace")
    if "Traceback" in told:
        print(told, file=sys.stderr)
        print("the server's log has a traceback", file=sys.stderr)
        return 1
    return code


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=int, default=600, help="for how long (default: 600)")
    parser.add_argument("--model-path", help="folder of a model (default: the embedded one)")
    parser.add_argument("--seed", type=int, help="of the requests (default: random)")
    return parser.parse_args()


def _fuzz_server(options: argparse.Namespace, log: Path) -> int:
    port = free_port()
    words = [*_SERVER, "--port", str(port)]
    words += ["--model-path", options.model_path] if options.model_path else []
    with log.open("wb") as output:
        try:
            with running_server(words, "127.0.0.1", port, output.fileno()) as url:
                command = _command(url, options)
                return subprocess.run(command, env=_environment(), cwd=log.parent).returncode
        except ServerProblem as error:
            print(f"{error}\n{log.read_text(errors='replace')}", file=sys.stderr)
            return 1


def _command(url: str, options: argparse.Namespace) -> list[str]:
    command = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{url}/openapi.json"]
    command += ["--checks", ",".join(_CHECKS), "--phases", "examples,coverage,fuzzing", "--workers", "2"]
    command += ["--max-time", str(options.seconds), "--request-timeout", "120", "--continue-on-failure"]
    command += ["--generation-database", "none", "--suppress-health-check", "all", "--no-color"]
    command += [word for path in _LEFT_OUT for word in ("--exclude-path", path)]
    return command + ([] if options.seed is None else ["--seed", str(options.seed)])


def _environment() -> dict[str, str]:
    return {**os.environ, "SCHEMATHESIS_HOOKS": "scripts.fuzz_hooks", "PYTHONPATH": str(ROOT)}


if __name__ == "__main__":
    raise SystemExit(main())

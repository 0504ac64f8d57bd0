"""``python -m sglang.launch_server``: serve a model over HTTP until Ctrl-C or SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import shlex
import sys
from collections.abc import Sequence

from sglang.srt.entrypoints.http_server import listen, serve
from sglang.srt.entrypoints.prepare import StartError, check_flags, prepare
from sglang.srt.managers.mode_args import when_speculative
from sglang.srt.server_args import SECRETS, ServerArgs
from sglang.srt.utils.flags import ServerArgsError, exit_with_error, option_name
from sglang.srt.utils.installation import upstream_conflict
from sglang.srt.utils.log import configure_logging
from sglang.srt.utils.open_files import allow_many_files
from sglang.version import __version__

PROG = "python -m sglang.launch_server"

logger = logging.getLogger("sglang.launch_server")


def main(argv: Sequence[str] | None = None) -> int:
    conflict = upstream_conflict()
    if conflict:
        exit_with_error(conflict)
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        given = ServerArgs.from_command_line(words, PROG)
        check_flags(given)
        configure_logging(given.log_level)
        logger.info("sglang-toggle %s: preparing %s.", __version__, given.model_path or "the embedded model")
        allow_many_files()
        listener = listen(given.host, given.port)
        prepared = prepare(given)
        _log_speculation(prepared.args)
        return asyncio.run(serve(prepared, listener, f"{PROG} {shlex.join(_without_key(words))}".strip()))
    except (ServerArgsError, StartError) as error:
        exit_with_error(str(error))
    except KeyboardInterrupt:
        return 0


def _log_speculation(args: ServerArgs) -> None:
    if args.speculative_algorithm is None:
        logger.info("Decoding plainly: no drafter.")
        return
    logger.info(
        "Speculating %s: %s, %d steps, topk %d, %d draft tokens.",
        when_speculative(args),
        args.speculative_algorithm,
        args.speculative_num_steps,
        args.speculative_eagle_topk,
        args.speculative_num_draft_tokens,
    )


def _without_key(words: Sequence[str]) -> list[str]:
    """The command line as it may be shown to clients."""
    options = tuple(option_name(name) for name in SECRETS)
    shown: list[str] = []
    for word in words:
        option, given, _ = word.partition("=")
        if shown and shown[-1] in options:
            shown.append("***")
        else:
            shown.append(f"{option}=***" if given and option in options else word)
    return shown


if __name__ == "__main__":
    sys.exit(main())

"""The study's command line."""

import argparse
import os
from pathlib import Path
from typing import Final

from benchmark.spec_toggle.columns import AUTO, STUDY_MODES
from benchmark.spec_toggle.protocols import PROTOCOLS
from benchmark.spec_toggle.records import PLAIN, SPEC, TOGGLE

STREAMS: Final = (1, 2, 5, 10, 30, 70, 100, 250)
MODES: Final = (PLAIN, SPEC, TOGGLE, AUTO)
QUICK: Final = {"streams": (1, 5, 30), "datasets": ("humaneval",), "rounds": 2, "minutes": 3.0}


def parse_arguments(description: str, arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; what ``--quick`` makes smaller can still be given."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _work_flags(parser.add_argument_group("what is measured"))
    _server_flags(parser.add_argument_group("servers that are started (default: the embedded model's)"))
    _running_flags(parser.add_argument_group("servers that run already (none is started then)"))
    _output_flags(parser.add_argument_group("output"))
    known = parser.parse_args(arguments)
    for name, value in QUICK.items() if known.quick else ():
        if getattr(known, name) == parser.get_default(name):
            setattr(known, name, value)
    unknown = set(known.modes) - set(STUDY_MODES)
    if unknown:
        parser.error(f"--modes knows {', '.join(STUDY_MODES)}, not {', '.join(sorted(unknown))}")
    if min(known.streams) < 1:
        parser.error("--streams are numbers from 1 on, like 1,2,5")
    return known


def int_list(text: str) -> tuple[int, ...]:
    """Read ``1,2,5``."""
    return tuple(int(part) for part in text.split(","))


def name_list(text: str) -> tuple[str, ...]:
    """Read ``a,b``."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def named_url(text: str) -> tuple[str, str]:
    """Read ``name=url``, or a mere url, which then is its own name."""
    name, mark, url = text.partition("=")
    if not mark or "://" in name:
        name, url = text.split("://")[-1].rstrip("/"), text
    if "://" not in url:
        raise argparse.ArgumentTypeError(f"{text!r} is no name=url: write e.g. vllm=http://127.0.0.1:8000")
    return name, url


def _work_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--quick", action="store_true", help="3 minutes: fewer streams, one domain, 2 rounds")
    group.add_argument(
        "--streams", type=int_list, default=STREAMS, help="at once, e.g. 1,2,5 (all in one client)"
    )
    group.add_argument("--modes", type=name_list, default=MODES, help=f"of {','.join(STUDY_MODES)}")
    group.add_argument("--datasets", type=name_list, default=("humaneval", "bfcl"), help="and chat")
    group.add_argument("--rounds", type=int, default=5, help="of each point, as far as --minutes allow")
    group.add_argument("--minutes", type=float, default=20.0, help="no point is run a third time after that")
    group.add_argument("--tokens", type=int, help="of each stream (default: 256; embedded model: 16 to 41)")
    group.add_argument("--num-prompts", type=int, default=16, help="of a domain in one round")
    group.add_argument("--min-prompts", type=int, default=2, help="prompts of a run with fewer streams")
    group.add_argument("--fixed-runs", type=int, default=2, help="of the fixed prompt in a round; 0: none")
    group.add_argument(
        "--max-tools", type=int, help="a conversation (bfcl; embedded model: 2, otherwise all)"
    )
    group.add_argument("--cold", action="store_true", help="empty the prefix cache before each run")
    group.add_argument("--temperature", type=float, default=0.0)
    group.add_argument("--seed", type=int, default=2, help="of the order of runs and prompts")
    group.add_argument("--run-timeout", type=float, default=600.0, help="seconds of one run")


def _server_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--threshold", type=int, help="N of the toggle (default: the embedded model's)")
    group.add_argument("--num-steps", type=int, default=3, help="drafts of a speculative step")
    group.add_argument(
        "--launch-args", help="of both servers, in one string, in place of the embedded model's"
    )
    group.add_argument(
        "--drafter-args", default="", help="with --launch-args: further ones of the one that drafts"
    )
    group.add_argument("--server-args", default="", help="further arguments of both, in one string")
    group.add_argument(
        "--in-turn", action="store_true", help="one server at a time, as on GPUs that hold one"
    )
    group.add_argument("--max-total-tokens", type=int, default=65536, help="KV cache (embedded model)")
    group.add_argument("--start-timeout", type=float, default=300.0)


def _running_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--base-url", type=named_url, action="append", default=[], metavar="NAME=URL",
                       help="SGLang, vLLM or any OpenAI server; may be repeated")  # fmt: skip
    group.add_argument("--protocol", choices=tuple(PROTOCOLS), help="default: native, or else chat")
    group.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="or OPENAI_API_KEY")
    group.add_argument(
        "--tokenizer", default="", help="folder (default: what the server says, if it is here)"
    )


def _output_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--out", type=Path, default=Path(".cache/study"), help="results and logs")
    group.add_argument("--plot", type=Path, help="where the picture goes as .png and .svg (default: --out)")
    group.add_argument(
        "--from-jsonl", type=Path, action="append", default=[], help="only report on earlier runs"
    )
    group.add_argument("--update-doc", type=Path, help="a Markdown file to put the report into")
    group.add_argument("--section", default="cpu-study", help="between its markers of this name")

"""The real model of the scripts here: SmolLM2 with its drafter, or folders that are named."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from benchmark.h200.shapes import Folders
from benchmark.spec_toggle.prompts import HELDOUT, interleaved, read_prompts
from sglang.embedded.model import embedded_drafter_path, embedded_model_path
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.utils.text_tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    id: str
    domain: str
    ids: tuple[int, ...]


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model-path", type=Path, help="default: the embedded model")
    parser.add_argument("--draft-model-path", type=Path, help="default: the embedded drafter")
    parser.add_argument("--tokenizer-path", type=Path, help="default: the model's folder")
    parser.add_argument("--prompts", type=Path, default=HELDOUT)


def folders_of(args: argparse.Namespace) -> Folders:
    target = args.model_path or Path(embedded_model_path())
    return Folders(target, args.draft_model_path or Path(embedded_drafter_path()))


def context_of(folder: Path) -> int:
    return ModelConfig.from_folder(folder).context_len


def heldout_ids(args: argparse.Namespace, folder: Path, output_len: int) -> list[Prompt]:
    """The held-out prompts, a mix of the domains from the first on; those that the context holds."""
    tokenizer = TextTokenizer.from_folder(args.tokenizer_path or folder)
    most = context_of(folder) - output_len
    prompts = interleaved(read_prompts(args.prompts))
    found = [
        Prompt(p.id, p.domain, tuple(tokenizer.encode(p.text, add_special_tokens=False))) for p in prompts
    ]
    return [prompt for prompt in found if 0 < len(prompt.ids) <= most]

"""From what the user gave to what the server runs with; every configuration error comes from here."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from sglang.embedded.convert import EmbeddedModelError
from sglang.embedded.model import (
    EMBEDDED_DISABLE_BS_THRESHOLD,
    EMBEDDED_MODEL_NAME,
    embedded_drafter_path,
    embedded_model_path,
)
from sglang.srt.configs.config_fields import ModelConfigError
from sglang.srt.configs.draft_choice import choose_drafter
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.speculative_args import EAGLE3, parse_algorithm
from sglang.srt.managers.chat_templates import ChatTemplate, load_chat_template, read_template
from sglang.srt.managers.mode_args import check_mode
from sglang.srt.server_args import ServerArgs
from sglang.srt.server_args_checks import replacements, shape_warning
from sglang.srt.utils.flags import ServerArgsError
from sglang.srt.utils.text_tokenizer import TextTokenizer, TokenizerError

logger = logging.getLogger(__name__)

_EMBEDDED_ARCHITECTURE = "LlamaForCausalLM"
_EMBEDDED_STEPS = 3
_EMBEDDED_CAPTURE_MAX_BS = 128


class StartError(RuntimeError):
    """The server can't start; the message is one line for the user."""


@dataclass(frozen=True, slots=True)
class Prepared:
    args: ServerArgs  # resolved
    model: ModelConfig
    tokenizer: TextTokenizer
    chat_template: ChatTemplate | None


def prepare(given: ServerArgs) -> Prepared:
    """
    Raises:
        StartError: the configuration is wrong, or a file it names.
    """
    check_flags(given)
    try:
        return _prepare(given)
    except (ServerArgsError, ModelConfigError, TokenizerError, EmbeddedModelError) as error:
        raise StartError(str(error)) from error


def check_flags(given: ServerArgs) -> None:
    """What is wrong whatever the model says. The embedded model may have to be converted first, which takes
    a while.

    Raises:
        StartError: something is.
    """
    try:
        _check_flags(given)
    except (ServerArgsError, TokenizerError, EmbeddedModelError) as error:
        raise StartError(str(error)) from error


def _check_flags(given: ServerArgs) -> None:
    if given.model_path is not None:
        given.resolve(None)
    else:
        check_mode(_with_embedded_defaults(given, EMBEDDED_MODEL_NAME).resolve(_EMBEDDED_ARCHITECTURE))
    if given.tokenizer_path is not None:
        _check_tokenizer(given.tokenizer_path)
    if given.chat_template is not None:
        read_template(Path(given.chat_template))


def _check_tokenizer(folder: str) -> None:
    if not Path(folder).is_dir():
        raise TokenizerError(f"tokenizer path {folder} is not a folder")


def _prepare(given: ServerArgs) -> Prepared:
    args = with_embedded_model(given)
    assert args.model_path is not None
    model = ModelConfig.from_folder(args.model_path, args.context_length)
    warning = shape_warning(args, model.architecture)
    if warning:
        logger.warning("%s", warning)
    if args.trust_remote_code:
        logger.info("--trust-remote-code: nothing to trust, code from a checkpoint is never run here")
    wanted, args = args, args.resolve(model.architecture)
    for line in replacements(wanted, args):
        logger.info("%s", line)
    if args.speculative_algorithm is not None:
        _check_drafter(args.speculative_algorithm, args.speculative_draft_model_path, model)
    check_mode(args)
    return load_prepared(args, model)


def load_prepared(args: ServerArgs, model: ModelConfig) -> Prepared:
    """What belongs to resolved arguments."""
    assert args.tokenizer_path is not None
    _check_tokenizer(args.tokenizer_path)
    tokenizer = TextTokenizer.from_folder(args.tokenizer_path)
    return Prepared(args, model, tokenizer, load_chat_template(tokenizer, args.chat_template))


def _check_drafter(kind: str, folder: str | None, model: ModelConfig) -> None:
    try:
        choose_drafter(kind, folder, model)
    except ModelConfigError as error:
        flag = "algorithm " + kind if folder is None else "draft-model-path"
        raise ModelConfigError(f"--speculative-{flag}: {error}") from error


def with_embedded_model(args: ServerArgs) -> ServerArgs:
    """Without a model path: the embedded model, its drafter and its threshold. What was given stays."""
    return args if args.model_path is not None else _with_embedded_defaults(args, embedded_model_path())


def _with_embedded_defaults(args: ServerArgs, folder: str) -> ServerArgs:
    args = replace(
        args,
        model_path=folder,
        served_model_name=args.served_model_name or EMBEDDED_MODEL_NAME,
        enable_metrics=True,
    )
    algorithm = parse_algorithm(args.speculative_algorithm or EAGLE3)
    if algorithm is None:
        return args
    args = replace(args, speculative_algorithm=algorithm)
    if algorithm == EAGLE3 and args.speculative_draft_model_path is None:
        args = replace(args, speculative_draft_model_path=embedded_drafter_path())
    if args.speculative_disable_bs_threshold is None and args.speculative_bs_schedule is None:
        args = replace(args, speculative_disable_bs_threshold=EMBEDDED_DISABLE_BS_THRESHOLD)
    threshold = args.speculative_disable_bs_threshold
    if args.speculative_capture_max_bs is None and isinstance(threshold, int):
        # On a CPU nothing is captured, so that the threshold may be raised as far as anybody likes.
        args = replace(args, speculative_capture_max_bs=max(_EMBEDDED_CAPTURE_MAX_BS, threshold))
    shape = (args.speculative_num_steps, args.speculative_eagle_topk, args.speculative_num_draft_tokens)
    return args if shape != (None, None, None) else replace(args, speculative_num_steps=_EMBEDDED_STEPS)

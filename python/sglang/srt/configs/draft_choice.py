"""What the folders say of the kind of drafter that is asked for. Nothing is loaded here."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sglang.srt.configs.config_fields import ModelConfigError
from sglang.srt.configs.model_config import ModelConfig, has_drafter_alone
from sglang.srt.configs.speculative_args import EAGLE3, NEXTN, NGRAM, STANDALONE


@dataclass(frozen=True, slots=True)
class DraftChoice:
    kind: str
    folder: str | None = None  # None: nothing to load
    config: ModelConfig | None = None  # of the draft layer, head or model


def choose_drafter(kind: str, draft_folder: str | None, target: ModelConfig) -> DraftChoice:
    """``draft_folder``: --speculative-draft-model-path.

    Raises:
        ModelConfigError: the folder holds no drafter of this kind, or one for another target.
    """
    if kind == NGRAM:
        return DraftChoice(NGRAM)
    if kind == NEXTN:
        return _own_head(draft_folder, target)
    assert draft_folder is not None, "the flags were checked"
    if kind == EAGLE3:
        return DraftChoice(
            EAGLE3, draft_folder, ModelConfig.from_draft_folder(draft_folder, target.context_len)
        )
    config = ModelConfig.from_folder(draft_folder)
    if config.vocab_size != target.vocab_size:
        raise ModelConfigError(
            f"{draft_folder} has a vocabulary of {config.vocab_size} ids and the target one of"
            f" {target.vocab_size}: a draft model must have the target's tokenizer"
        )
    return DraftChoice(STANDALONE, draft_folder, config)


def _own_head(draft_folder: str | None, target: ModelConfig) -> DraftChoice:
    if draft_folder is None:
        return DraftChoice(NEXTN, target.path, nextn_config(target, target))
    if has_drafter_alone(draft_folder):
        raise ModelConfigError(
            f"{draft_folder} holds an EAGLE-3 drafter: use --speculative-algorithm EAGLE3 with it"
        )
    return DraftChoice(NEXTN, draft_folder, nextn_config(ModelConfig.from_folder(draft_folder), target))


def nextn_config(config: ModelConfig, target: ModelConfig) -> ModelConfig:
    """The head's one layer as a model of its own; its experts keep the index that its tensors have.

    Raises:
        ModelConfigError: there is no such head, there are several, or it is another model's.
    """
    if config.num_nextn_layers != 1:
        raise ModelConfigError(
            f"{config.path}: speculation with the model's own draft head needs num_nextn_predict_layers to be"
            f" 1, and it is {config.num_nextn_layers}: use --speculative-algorithm EAGLE3 with an EAGLE-3"
            " drafter's folder as --speculative-draft-model-path"
        )
    for what, own, theirs in (
        ("architecture", config.architecture, target.architecture),
        ("number of layers", config.num_layers, target.num_layers),
        ("hidden size", config.hidden_size, target.hidden_size),
        ("vocabulary", config.vocab_size, target.vocab_size),
    ):
        if own != theirs:
            raise ModelConfigError(
                f"{config.path} has a draft head for a target with {what} {own}, but the target's is {theirs}"
            )
    last, moe, mla = config.num_layers - 1, config.moe, config.mla
    if moe is not None and last in moe.layers:
        moe = replace(moe, layers=(config.num_layers,))
    if mla is not None and mla.index is not None:
        mla = replace(mla, index=replace(mla.index, layers=(0,)))
    return replace(config, num_layers=1, moe=moe, mla=mla, windows=())

"""A Hugging Face tokenizer from the tokens and merges of the GGUF file.

SmolLM2's tokenizer (GGUF pre-tokenizer type ``smollm``) splits every digit off by itself, then applies
GPT-2's byte-level rule and BPE.
"""

import json
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from sglang.embedded.metadata import GgufMetadata

_SPECIAL_TOKEN_TYPE: Final = 3  # GGUF's token type "control"


def build_tokenizer(metadata: GgufMetadata) -> Tokenizer:
    """Return the tokenizer; a byte the vocabulary lacks (rare control characters) becomes ``unk``."""
    vocab = {token: token_id for token_id, token in enumerate(metadata.tokens)}
    merges = [_split_merge(merge) for merge in metadata.merges]
    unk_token = metadata.tokens[metadata.unk_token_id]
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, unk_token=unk_token, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token, kind in zip(metadata.tokens, metadata.token_types, strict=True)
            if kind == _SPECIAL_TOKEN_TYPE
        ]
    )
    return tokenizer


def tokenizer_config(metadata: GgufMetadata) -> dict[str, Any]:
    """Return the contents of ``tokenizer_config.json``, the chat template included."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.max_position_embeddings,
        "bos_token": metadata.tokens[metadata.bos_token_id],
        "eos_token": metadata.tokens[metadata.eos_token_id],
        "pad_token": metadata.tokens[metadata.pad_token_id],
        "unk_token": metadata.tokens[metadata.unk_token_id],
        "chat_template": metadata.chat_template,
    }


def write_tokenizer(metadata: GgufMetadata, folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` into ``folder``."""
    build_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    text = json.dumps(tokenizer_config(metadata), indent=1, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def _split_merge(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right

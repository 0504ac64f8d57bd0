"""Tiny vocabularies in the layout of Kimi's checkpoints."""

from __future__ import annotations

import base64
import json
from collections import Counter
from pathlib import Path
from typing import Any

import regex

from sglang.srt.utils.tiktoken_codec import SPLIT_RULES

TEXT = """The quick brown fox doesn't jump over 12345 lazy dogs; it's THE Fox's 678th day, and they'll see.
你好世界，中文English混合。北京市 Pascal 日本語のテキスト 東京タワー 한국어 텍스트 É été ça où naïve
def f(x):\n\treturn {"city": "北京", "n": [1, 2, 3]}\r\n\r\n    indented   text  \n\n\n🙂🙂 👍🏽 ‍
functions.get_weather:0 <think> ﬁ ǅ ʰ ً ₂ Ⅷ ½ ſ 's 'S 'RE 'll"""


NAMES = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|im_end|>",
    3: "<|im_user|>",
    4: "<|im_assistant|>",
    10: "<|im_system|>",
}
NAMES |= {17: "<|im_middle|>", 11: "<|tool_calls_section_begin|>", 22: "<think>", 23: "</think>"}
NAMES |= {254: "[UNK]", 255: "[PAD]"}
PLAIN = {11, 22, 23}  # added tokens that are text for a client


def train_ranks(text: str, num_merges: int) -> dict[bytes, int]:
    """Byte pairs merged by how often they occur, as such a vocabulary is made."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    pattern = "|".join(SPLIT_RULES)
    words = Counter(
        tuple(bytes([b]) for b in word.encode()) for word in regex.findall(pattern, text, regex.VERSION1)
    )
    for _ in range(num_merges):
        pairs = Counter[tuple[bytes, bytes]]()
        for word, count in words.items():
            for pair in zip(word, word[1:], strict=False):
                pairs[pair] += count
        pairs = Counter({pair: n for pair, n in pairs.items() if b"".join(pair) not in ranks})
        if not pairs:
            break
        pair = max(pairs, key=lambda p: (pairs[p], p))
        ranks[b"".join(pair)] = len(ranks)
        words = Counter({_merge(word, pair): count for word, count in words.items()})
    return ranks


def _merge(word: tuple[bytes, ...], pair: tuple[bytes, bytes]) -> tuple[bytes, ...]:
    merged: list[bytes] = []
    for part in word:
        if merged and (merged[-1], part) == pair:
            merged[-1] += part
        else:
            merged.append(part)
    return tuple(merged)


def kimi_config(num_ranks: int) -> dict[str, Any]:
    added = {
        str(num_ranks + number): {"content": name, "special": number not in PLAIN}
        for number, name in NAMES.items()
    }
    return {
        "added_tokens_decoder": added,
        "additional_special_tokens": ["<|im_end|>", "<|im_user|>"],
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer",
        "unk_token": "[UNK]",
    }


def write_tiny_kimi(folder: Path, num_merges: int = 150, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    ranks = train_ranks(TEXT, num_merges)
    lines = [base64.b64encode(token) + b" " + str(rank).encode() for token, rank in ranks.items()]
    (folder / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(kimi_config(len(ranks)) | config))
    return folder

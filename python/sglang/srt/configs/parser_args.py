"""The names of parsers, as SGLang has them, for the command line."""

from __future__ import annotations

from typing import Final

TOOL_CALL_PARSERS: Final = (
    "deepseekv3", "deepseekv31", "deepseekv32", "glm", "glm45", "glm47", "gpt-oss", "hermes", "kimi_k2",
    "llama3", "pythonic", "qwen", "qwen25", "qwen3_coder",
)  # fmt: skip
REASONING_PARSERS: Final = (
    "deepseek-r1", "deepseek-v3", "glm45", "gpt-oss", "kimi", "kimi_k2", "qwen3", "qwen3-thinking",
)  # fmt: skip

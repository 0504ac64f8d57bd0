"""The tool parsers by their names on the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from sglang.srt.function_call import glm, hermes, llama3
from sglang.srt.function_call.events import CallWriter, ToolEvent, ToolSource
from sglang.srt.function_call.forced import read_forced
from sglang.srt.function_call.harmony import read_harmony
from sglang.srt.function_call.pythonic import read_pythonic
from sglang.srt.function_call.sections import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    KIMI_K2,
    SectionFormat,
    all_markers,
    section_reader,
)
from sglang.srt.function_call.tagged import DSML_BEGIN, DSML_SECTION, QWEN_BEGIN, read_dsml, read_qwen3_coder
from sglang.srt.function_call.tools import Tools
from sglang.srt.utils.text_source import PieceParser, Wait


@dataclass(frozen=True, slots=True)
class ToolFormat:
    read: Callable[[ToolSource, CallWriter, Tools], Wait[None]]
    begins: tuple[str, ...] = ()  # what can only begin a call, and so ends a reasoning
    special_tokens: bool = False  # whether its marks are special tokens, which a reply's text lacks else

    def parser(self, tools: Tools) -> PieceParser[ToolEvent]:
        def run(source: ToolSource) -> Iterator[None]:
            writer = CallWriter(source)
            yield from self.read(source, writer, tools)
            writer.end_of_text()

        return PieceParser(run)


def _sections(form: SectionFormat) -> ToolFormat:
    return ToolFormat(section_reader(form), tuple(all_markers(form)))


FORCED: Final = ToolFormat(read_forced)
_HERMES: Final = ToolFormat(hermes.read_hermes, (hermes.BEGIN,))
_GLM: Final = ToolFormat(glm.read_glm, (glm.BEGIN,))

TOOL_FORMATS: Final[dict[str, ToolFormat]] = {
    "deepseekv3": _sections(DEEPSEEK_V3),
    "deepseekv31": _sections(DEEPSEEK_V31),
    "deepseekv32": ToolFormat(read_dsml, (DSML_SECTION[0], DSML_BEGIN), special_tokens=True),
    "glm": _GLM,
    "glm45": _GLM,
    "glm47": _GLM,
    "gpt-oss": ToolFormat(read_harmony, special_tokens=True),
    "hermes": _HERMES,
    "kimi_k2": _sections(KIMI_K2),
    "llama3": ToolFormat(llama3.read_llama3, (llama3.BEGIN,), special_tokens=True),
    "pythonic": ToolFormat(read_pythonic),
    "qwen": _HERMES,
    "qwen25": _HERMES,
    "qwen3_coder": ToolFormat(read_qwen3_coder, (QWEN_BEGIN,)),
}

"""What every endpoint works with."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.chat_templates import ChatTemplate
from sglang.srt.managers.text_request_log import RequestLog
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.server_args import ServerArgs
from sglang.version import __version__


@dataclass(frozen=True, slots=True)
class ServerContext:
    args: ServerArgs  # resolved
    model: ModelConfig
    manager: TokenizerManager
    chat_template: ChatTemplate | None
    launch_command: str
    started_ts: float
    startup_time_s: float
    request_log: RequestLog = field(default_factory=lambda: RequestLog(enabled=False, level=2))
    created_ts: int = field(default_factory=lambda: int(time.time()))

    @property
    def model_name(self) -> str:
        assert self.args.served_model_name is not None
        return self.args.served_model_name

    def sampling_defaults(self) -> dict[str, Any]:
        """Of the OpenAI endpoints: a request's own values come first."""
        return dict(self.model.sampling_defaults) if self.args.sampling_defaults == "model" else {}

    def model_info(self) -> dict[str, Any]:
        return {
            "model_path": self.args.model_path,
            "served_model_name": self.model_name,
            "tokenizer_path": self.args.tokenizer_path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": self.args.weight_version,
            "load_format": self.args.load_format,
            "reasoning_parser": self.args.reasoning_parser,
            "tool_call_parser": self.args.tool_call_parser,
            "disaggregation_mode": "null",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": self.model.model_type,
            "architectures": [self.model.architecture],
        }

    async def server_info(self) -> dict[str, Any]:
        state = await self.manager.get_state()
        limits = self.manager.limits
        internal = {
            **self.args.public_dict(),
            "world_size": 1,
            "startup_time": self.startup_time_s,
            "disaggregation_mode": "null",
            **state,
        }
        return {
            **self.args.public_dict(),
            "launch_command": self.launch_command,
            "status": "ready",
            "context_len": limits.context_len,
            "max_total_num_tokens": limits.max_total_num_tokens,
            "max_req_input_len": min(limits.context_len, limits.max_total_num_tokens) - 1,
            "startup_time": self.startup_time_s,
            "internal_states": [internal],
            "version": __version__,
        }


def new_rid() -> str:
    return uuid.uuid4().hex

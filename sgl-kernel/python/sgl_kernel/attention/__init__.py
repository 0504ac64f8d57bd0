"""Attention: decode and verify, and prefill."""

from sgl_kernel.attention.decode.op import decode_attention
from sgl_kernel.attention.decode.plan import AttentionShape, DecodePlan, DecodeWorkspace, View, plan_decode
from sgl_kernel.attention.decode.turn import Turn, can_turn
from sgl_kernel.attention.prefill.op import PrefillPlan, plan_prefill, prefill_attention

__all__ = [
    "AttentionShape",
    "DecodePlan",
    "DecodeWorkspace",
    "PrefillPlan",
    "Turn",
    "View",
    "can_turn",
    "decode_attention",
    "plan_decode",
    "plan_prefill",
    "prefill_attention",
]

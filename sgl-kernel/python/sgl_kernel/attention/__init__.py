"""Attention: decode and verify, prefill, and the write of keys and values."""

from sgl_kernel.attention.decode.op import decode_attention
from sgl_kernel.attention.decode.plan import AttentionShape, DecodePlan, DecodeWorkspace, View, plan_decode
from sgl_kernel.attention.decode.turn import Turn, can_turn
from sgl_kernel.attention.prefill.op import PrefillPlan, plan_prefill, prefill_attention
from sgl_kernel.attention.store.op import store_kv

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
    "store_kv",
]

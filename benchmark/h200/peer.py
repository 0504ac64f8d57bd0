"""The peer's figures: vLLM 0.20.2 on one H200 with the same shapes, input 1024 and output 256.

Plain decoding, and an EAGLE-3 head with 3 drafts; milliseconds. Prefill: until every request of the
batch has its first token, 16,384 tokens a step.
"""

from __future__ import annotations

from typing import Final

PLAIN_STEP_MS: Final = {
    1: 4.99, 2: 5.03, 4: 5.13, 8: 5.32, 16: 5.64, 32: 6.38, 64: 7.78, 128: 10.97,
}  # fmt: skip
SPEC_STEP_MS: Final = {
    1: 6.68, 2: 6.81, 4: 6.97, 8: 7.25, 16: 7.67, 32: 8.96, 64: 12.61, 128: 21.67,
}  # fmt: skip
PLAIN_PREFILL_MS: Final = {1: 25.7, 4: 103.0, 8: 183.0, 16: 369.0, 32: 748.0, 64: 1530.0, 128: 3068.0}
SPEC_PREFILL_MS: Final = {1: 27.8, 4: 96.0, 8: 191.0, 16: 380.0, 32: 789.0, 64: 1594.0, 128: 3257.0}
PREFILL_LEN: Final = 1024

"""The threshold of the running server: the one thing about the toggle that can be changed."""

from __future__ import annotations

from sglang.srt.speculative.toggle import check_threshold


class ToggleSettings:
    def __init__(self, threshold: int | None, max_spec_rows: int, has_drafter: bool) -> None:
        self.threshold = threshold
        self.max_spec_rows = max_spec_rows
        self.has_drafter = has_drafter

    def set_threshold(self, value: object) -> None:
        """Raises ThresholdError, and then nothing has changed."""
        self.threshold = check_threshold(value, self.max_spec_rows, self.has_drafter)

"""Random histories of a trace by several writers, against a plain dict of arrays."""

from __future__ import annotations

from hypothesis import settings

from tracefile import prefixes
from tracefile.testing import TraceHistory


class _ShortBlocks(TraceHistory):
    """With prefixes found from four rows on, so that small samples share."""

    def __init__(self) -> None:
        self.block_rows, prefixes.BLOCK_ROWS = prefixes.BLOCK_ROWS, 4
        super().__init__()

    def teardown(self) -> None:
        prefixes.BLOCK_ROWS = self.block_rows
        super().teardown()


_ShortBlocks.TestCase.settings = settings(max_examples=30, stateful_step_count=15, deadline=None)
TestHistory = _ShortBlocks.TestCase

"""Random histories of a trace by several writers, against a plain dict of arrays."""

from __future__ import annotations

from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, rule

from tracefile import prefixes
from tracefile.compact import compact_trace
from tracefile.testing import RetentionHistory, TraceHistory


class _ShortBlocks(RuleBasedStateMachine):
    """With prefixes found from four rows on, so that small samples share."""

    def __init__(self) -> None:
        self.block_rows, prefixes.BLOCK_ROWS = prefixes.BLOCK_ROWS, 4
        super().__init__()

    def teardown(self) -> None:
        prefixes.BLOCK_ROWS = self.block_rows
        super().teardown()


class _History(_ShortBlocks, TraceHistory):
    pass


class _RetentionHistory(_ShortBlocks, RetentionHistory):
    @rule()
    def compact(self) -> None:
        """Merge what there is; a later collection meets what moved."""
        compact_trace(self.path, min_segments=2, min_age=0, settle=0, durable=False)


for _machine in (_History, _RetentionHistory):
    _machine.TestCase.settings = settings(max_examples=15, stateful_step_count=15, deadline=None)
TestHistory = _History.TestCase
TestRetentionHistory = _RetentionHistory.TestCase

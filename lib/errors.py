"""One typed error per kind of bad input; every message says where, expected, found, and what to do."""

from __future__ import annotations

from pathlib import Path


class WorkbookError(Exception):
    """Base of every error this workbook raises on purpose.

    Args:
        where: the file (or argument) at fault.
        field: tensor, key or field inside it.
        expected: what would have been right.
        found: what was there.
        remedy: the next thing to try.
    """

    def __init__(self, where: str | Path, field: str, *, expected: str, found: str, remedy: str) -> None:
        self.where, self.field = str(where), field
        self.expected, self.found, self.remedy = expected, found, remedy
        super().__init__(f"{self.where}: {field}: expected {expected}, found {found}. What to do: {remedy}")

    def __reduce__(self):
        """Survive pickling, so that a worker process can hand the error back whole."""
        return (
            _rebuild,
            (type(self), self.where, self.field, self.expected, self.found, self.remedy),
        )


def _rebuild(kind, where, field, expected, found, remedy):
    return kind(where, field, expected=expected, found=found, remedy=remedy)


class CaptureError(WorkbookError):
    """A capture file that cannot be read as what it claims to be."""


class CheckpointError(WorkbookError):
    """A draft or target checkpoint with missing, surplus or malformed content."""


class ContractError(WorkbookError):
    """A contract that contradicts itself, the draft, or the captures it is applied to."""


class TargetError(WorkbookError):
    """The target model cannot be fetched, unpacked or loaded."""


class MetricError(WorkbookError):
    """A metric asked of predictions that cannot answer it."""


class EngineError(WorkbookError):
    """The serving engine is absent, cannot express what was asked, or did not do it."""


class ReportError(WorkbookError):
    """A report that cannot be made as asked, read, or compared."""


class ClusterError(WorkbookError):
    """The cluster is lost, or its workers do not see what this process sees."""

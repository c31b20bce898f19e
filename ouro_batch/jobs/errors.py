"""What can go wrong around a job, besides its requests, model and engine."""

from __future__ import annotations

from ouro_batch.errors import OuroBatchError


class UsageError(OuroBatchError):
    """The job cannot start as it was asked for: a missing input, an output that exists."""


class FileError(OuroBatchError):
    """Reading the input or writing the output failed while the job ran."""


class OutputClosed(OuroBatchError):
    """Whoever read the records has stopped reading."""


class TooManyErrors(OuroBatchError):
    """As many records have failed as the job was to bear."""

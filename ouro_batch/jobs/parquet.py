"""Parquet files as lines: each row an object of its columns, read a batch at a time."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from ouro_batch.jobs.errors import UsageError

ROWS = 1024  # read at a time


def parquet_lines(source: str) -> Iterator[bytes | str]:
    """The rows of a file as JSON, or in words why one cannot be.

    Dates become text, durations seconds; bytes must be UTF-8.

    Raises:
        UsageError: pyarrow is not installed.
        OSError, ValueError: the file cannot be read.
    """
    with require_pyarrow().ParquetFile(source) as file:
        for batch in file.iter_batches(ROWS):
            for row in batch.to_pylist():
                try:
                    yield orjson.dumps(row, default=_plain)
                except orjson.JSONEncodeError as error:
                    yield f"the row has no place in JSON: {error.__cause__ or error}"


def parquet_rows(source: str, unless: Sequence[str] = ()) -> int | None:
    """How many rows a file has, None where it has a column ``unless``; reads only its end."""
    with require_pyarrow().ParquetFile(source) as file:
        if set(unless) & set(file.schema_arrow.names):
            return None
        return file.metadata.num_rows


def require_pyarrow() -> Any:
    """The package that reads Parquet files.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import pyarrow.parquet
    except ImportError:
        raise UsageError(
            "reading .parquet files needs the package pyarrow"
            " (pip install 'ouro-batch[parquet]', or export the file as JSON Lines)"
        ) from None
    return pyarrow.parquet


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, decimal.Decimal):
        return str(value)
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    raise TypeError(f"a value of type {type(value).__name__} has no place in JSON")

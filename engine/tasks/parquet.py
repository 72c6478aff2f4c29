"""Rows of a parquet file. A row of it cannot be read without its whole row group, so the rows are unpacked into small
Arrow batches, of which one is read for a row."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import BadRowError, UserError
from .sequences import Row, Rows
from .stored import BLOCK, Spool, Stored, Unpacked

READ_AT_ONCE = 1 << 18
"""Bytes of a batch, about; a row of more is a batch alone."""
MOST_ROWS = 1024


class Batches(Rows):
    """Rows in Arrow batches.

    Args:
        file: the file that they come from.
        batches: serialized batches.
        starts: [batches + 1] int64, the first byte of each batch, and the end of the last one.
        firsts: [batches + 1] int64, the first row of each batch, and the number of rows.
        where: the file, for error messages.
    """

    def __init__(
        self,
        file: Stored,
        batches: Stored,
        schema: pa.Schema,
        starts: npt.NDArray[np.int64],
        firsts: npt.NDArray[np.int64],
        where: str,
    ) -> None:
        self._file, self._batches, self._schema = file, batches, schema
        self._starts, self._firsts, self._where = starts, firsts, where

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def row(self, number: int) -> Row:
        index = int(np.searchsorted(self._firsts, number, "right")) - 1
        row = self._rows(self._batch(index).slice(number - int(self._firsts[index]), 1), number)[0]
        if isinstance(row, BadRowError):
            raise row
        return row

    def scan(self) -> Iterator[Row | BadRowError]:
        for index in range(len(self._starts) - 1):
            yield from self._rows(self._batch(index), int(self._firsts[index]))

    def digest(self) -> bytes:
        return self._file.digest()

    def _batch(self, index: int) -> pa.RecordBatch:
        begin, end = self._starts[index : index + 2].tolist()
        return pa.ipc.read_record_batch(pa.py_buffer(self._batches.read(begin, end)), self._schema)

    def _rows(self, batch: pa.RecordBatch, first: int) -> list[Row | BadRowError]:
        try:
            rows: list[Row | BadRowError] = batch.to_pylist()
            return rows
        except Exception as error:  # for a value without a Python type
            if len(batch) == 1:
                return [BadRowError(f"Row {first} of {self._where} cannot be read: {_why(error)}.")]
            return [row for i in range(len(batch)) for row in self._rows(batch.slice(i, 1), first + i)]


def read_parquet(stored: Stored, file: Path, shown: str, key: str, spool: Spool) -> Batches:
    """Return the rows of a parquet file, unpacked into ``spool``.

    Raises:
        UserError: it is not a readable parquet file.
    """
    begin, starts, firsts = spool.size, [0], [0]
    try:
        with pq.ParquetFile(file, buffer_size=BLOCK, pre_buffer=False) as opened:
            meta, schema = opened.metadata, opened.schema_arrow
            plain = pa.schema([field.with_type(_plain(field.type)) for field in schema])
            size = sum(meta.row_group(i).total_byte_size for i in range(meta.num_row_groups))
            together = _rows_of(64 * READ_AT_ONCE, meta.num_rows, size)
            groups = (opened.iter_batches(together, [group]) for group in range(meta.num_row_groups))
            for group_rows in chain.from_iterable(groups):  # rows of two groups may have two dictionaries
                table = pa.Table.from_batches([group_rows]).cast(plain).combine_chunks()
                for batch in table.to_batches(max_chunksize=_rows_of(READ_AT_ONCE, len(group_rows), table.nbytes)):
                    spool.write(batch.serialize())
                    starts.append(spool.size - begin)
                    firsts.append(firsts[-1] + len(batch))
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"The prompts file '{shown}' ({key}) is not a readable parquet file: {_why(error)}.") from error
    places = np.array(starts, np.int64), np.array(firsts, np.int64)
    return Batches(stored, Unpacked(spool, begin), plain, *places, f"'{shown}'")


def _rows_of(target_bytes: int, rows: int, size: int) -> int:
    """Return how many rows have about ``target_bytes`` bytes, where ``rows`` have ``size``."""
    return max(1, min(MOST_ROWS, target_bytes * rows // max(1, size)))


def _plain(kind: Any) -> Any:
    """Return an Arrow type whose values are no numbers of entries of a dictionary, which batches alone do not hold."""
    if pa.types.is_dictionary(kind):
        return _plain(kind.value_type)
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_plain(field.type)) for field in kind])
    for is_list, make in ((pa.types.is_list, pa.list_), (pa.types.is_large_list, pa.large_list)):
        if is_list(kind):
            return make(kind.value_field.with_type(_plain(kind.value_type)))
    return kind


def _why(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")

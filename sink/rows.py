"""The rows of a micro-batch on their way to the table: named, checked, folded, or set aside."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from foundation.errors import (
    InvalidInput,
    InvalidKey,
    InvalidValue,
    MissingColumn,
    SchemaError,
    UnknownColumn,
)
from foundation.suggestions import did_you_mean
from merge_engine.bucket.options import BucketOptions
from merge_engine.bucket.segment import AggMode, Operation
from merge_engine.encoding.keys import KeyCodec
from merge_engine.encoding.soundness import is_sound, show, unsound_rows
from merge_engine.merging.batch import read_batch, read_deletes
from merge_engine.merging.local_aggregation import OPERATION, fold_locally, with_operations
from merge_engine.schema.schema import Schema
from merge_engine.schema.types import conform
from recovery.writer.rows import Pieces, Rows

REASON = "_reason"
Flags = np.typing.NDArray[np.bool_]

_UNSOUND = "text that is not UTF-8, or a value that is none of its type"
_OPERATIONS = [operation.name.lower() for operation in Operation]
# A batch of raw rows is split by bucket before it is put: its own size is no matter here.
_UNLIMITED = replace(BucketOptions(), put_max_rows=2**62, put_max_bytes=2**62)


@dataclass(frozen=True, kw_only=True)
class InputColumns:
    """Which columns of the input go where: table columns by the names that the input has for them.

    `written` are the table's value columns that the sink owns; `renamed` maps the table's names to
    the input's where they differ; `operation` is the input's column of 'upsert' and 'delete'.
    """

    schema: Schema
    written: tuple[str, ...]
    renamed: Mapping[str, str]
    operation: str | None = None
    ignore_extra: bool = False

    def __post_init__(self) -> None:
        if not self.written:
            raise InvalidInput("a sink writes at least one column: columns=[...]")
        for name in (*self.written, *self.renamed):
            self.schema.column(name) if name not in self._orders() else None
        for name in self.written:
            if self.schema.column(name).function is None:
                raise SchemaError(
                    f"column '{name}' is part of the key; a sink writes value columns"
                )

    def names(self) -> dict[str, str]:
        """Return the needed columns: the table's name (or order_by's), and the input's."""
        keys = [column.name for column in self.schema.key_columns]
        wanted = dict.fromkeys((*keys, *self.written, *self._orders()))
        names = {name: self.renamed.get(name, name) for name in wanted}
        if self.operation is not None:
            names[self.operation] = self.operation
        return names

    def types(self) -> list[tuple[str, pa.DataType, bool]]:
        """Return the columns that have a type of their own: name, type, and whether it rounds."""
        wanted = [(column.name, column.type, False) for column in self.schema.key_columns]
        for name in self.written:
            function = self.schema.column(name).function
            assert function is not None
            if function.input_type is not None:
                wanted.append((name, function.input_type, function.rounds_input))
            if function.order_by is not None:
                wanted.append((function.order_by, function.order_type, False))
        return wanted

    def _orders(self) -> list[str]:
        functions = [self.schema.column(n).function for n in self.written if n in self.schema.names]
        return [f.order_by for f in functions if f is not None and f.order_by is not None]

    def check(self, columns: Sequence[str]) -> None:
        """Raise an error that names what the input lacks, or has beyond what is needed."""
        names = self.names()
        for name, of_input in names.items():
            if of_input not in columns:
                what = f"'{of_input}'" + (f" (for '{name}')" if of_input != name else "")
                hint = did_you_mean(of_input, list(columns)) or f"; it has {', '.join(columns)}"
                raise MissingColumn(f"the input has no column {what}{hint}")
        extra = [name for name in columns if name not in names.values()]
        if extra and not self.ignore_extra:
            listed = ", ".join(f"'{name}'" for name in extra)
            raise UnknownColumn(
                f"the input has columns that this sink does not write: {listed}; select what it "
                "needs, rename them by renamed={...}, or pass ignore_extra=True"
            )


@dataclass(frozen=True, kw_only=True)
class Read:
    """Rows to put; those set aside, each with a reason; and the keys found to be refused, why."""

    rows: Rows
    refused: pa.Table
    refused_keys: Mapping[bytes, str]


class RowReader:
    """Folds rows for the table; the bad ones fail the batch, or are set aside."""

    def __init__(self, columns: InputColumns, *, fold: bool, set_aside: bool) -> None:
        self._columns = columns
        self._fold = fold
        self._set_aside = set_aside

    @property
    def schema(self) -> Schema:
        """The schema whose names the rows have."""
        return self._columns.schema

    def read(self, data: pa.Table, exclude: Mapping[bytes, str]) -> Read:
        """Return the rows to put, and those set aside.

        `data` has the table's column names. `exclude`: encoded keys whose rows are known to be
        refused, each with why. Without setting aside, the first bad row is an error with a sample.
        """
        refused: list[pa.Table] = []
        found: dict[bytes, str] = {}
        try:
            if self._set_aside:
                data, refused = self._without_bad_rows(data)
                data, bad = self._without_keys(data, exclude)
                refused += bad
            rows = None
            while rows is None:
                try:
                    rows = self._rows(data)
                except InvalidValue as exc:
                    if not self._set_aside or exc.encoded_key is None:
                        raise
                    more = self._refused_keys(data)
                    if not more:
                        raise
                    found |= more
                    data, bad = self._without_keys(data, more)
                    refused += bad
        except InvalidInput as exc:
            raise self.with_sample(exc, data) from exc
        empty = data.schema.append(pa.field(REASON, pa.string())).empty_table()
        aside = pa.concat_tables([empty, *refused], promote_options="permissive")
        return Read(rows=rows, refused=aside, refused_keys=found)

    def _rows(self, data: pa.Table) -> Rows:
        columns = self._columns
        if not self._fold:
            # Judged here all the same: who asks the servers first has no row to show.
            read_batch(
                data,
                columns.schema,
                _UNLIMITED,
                columns=columns.written,
                operation_column=columns.operation,
            )
            return self.to_rows(data)
        folded = fold_locally(
            data,
            columns.schema,
            columns=columns.written,
            operation_column=columns.operation,
        )
        return self.to_rows(with_operations(folded.data, self._operation))

    @property
    def _operation(self) -> str | None:
        """The column of operations in the rows to put, whether there are deletes or not."""
        operation = self._columns.operation
        return OPERATION if operation is not None and self._fold else operation

    def to_rows(self, data: pa.Table | Pieces) -> Rows:
        """Return what was read, here or by others, as rows to put: all of it is read alike."""
        return Rows(
            data=data,
            columns=self._columns.written,
            mode=AggMode.MERGE_STATE if self._fold else AggMode.ACCUMULATE,
            operation_column=self._operation,
            schema=self._columns.schema,
        )

    def _without_bad_rows(self, data: pa.Table) -> tuple[pa.Table, list[pa.Table]]:
        """Take out rows with a null key, and rows with a value that its column cannot take."""
        data, refused = without_unsound_rows(data)
        for column in self._columns.schema.key_columns:
            null = pc.is_null(data.column(column.name)).to_numpy()
            data, bad = _split(data, null, f"key column '{column.name}' is null")
            refused += bad
        for name, wanted, rounding in self._columns.types():
            values = data.column(name).combine_chunks()
            check = partial(conform, target=wanted, column=name, allow_rounding=rounding)
            failing = _failing(check, values)
            data, bad = _split(data, failing, f"column '{name}' cannot be read as {wanted}")
            refused += bad
        operation = self._columns.operation
        if operation is not None:
            unknown = _unknown_operations(data.column(operation))
            data, bad = _split(data, unknown, f"column '{operation}' is no known operation")
            refused += bad
        return data, refused

    def _refused_keys(self, data: pa.Table) -> dict[bytes, str]:
        """Return all keys whose rows cannot be folded, and why; no key depends on another's rows.

        They are found by halving: one by one, each would cost a fold of the whole batch.
        """
        encoded = self._encoded(data).dictionary_encode()
        number_of_key = encoded.indices.to_numpy()
        by_key = data.take(pa.array(np.argsort(number_of_key, kind="stable")))
        bounds = np.append(0, np.cumsum(np.bincount(number_of_key))).tolist()
        refused: dict[bytes, str] = {}
        waiting = [(0, len(bounds) - 1)]
        while waiting:
            first, end = waiting.pop()
            try:
                self._rows(by_key.slice(bounds[first], bounds[end] - bounds[first]))
            except InvalidValue as exc:
                if end - first == 1:
                    refused[encoded.dictionary[first].as_py()] = str(exc)
                else:
                    middle = (first + end) // 2
                    waiting += [(first, middle), (middle, end)]
        return refused

    def _without_keys(
        self, data: pa.Table, keys: Mapping[bytes, str]
    ) -> tuple[pa.Table, list[pa.Table]]:
        if not keys:
            return data, []
        encoded = self._encoded(data)
        found = pc.index_in(encoded, value_set=pa.array(list(keys), encoded.type))
        reasons = pa.array(list(keys.values()), pa.string()).take(found.drop_null())
        return _split(data, found.is_valid().to_numpy(zero_copy_only=False), reasons)

    def _encoded(self, data: pa.Table) -> pa.BinaryArray:
        keys = self._columns.schema.key_columns
        arrays = [conform(data.column(k.name), k.type, column=k.name) for k in keys]
        return KeyCodec([key.type for key in keys]).encode(arrays)

    def with_sample(self, error: InvalidInput, data: pa.Table) -> InvalidInput:
        """Return the error with a row that shows it."""
        sample = self._sample(error, data)
        if sample is None:
            return error
        made = type(error)(f"{error}. A row of it: {sample}")
        if isinstance(error, InvalidValue) and isinstance(made, InvalidValue):
            made.encoded_key = error.encoded_key
        return made

    def _sample(self, error: InvalidInput, data: pa.Table) -> dict[str, object] | None:
        if data.num_rows == 0:
            return None
        row = self._row_of(error, data)
        return {name: show(data.column(name), row) for name in data.column_names}

    def _row_of(self, error: InvalidInput, data: pa.Table) -> int:
        """Return a row that the error is about, as far as it says; else the first."""
        chosen = np.zeros(data.num_rows, bool)
        if isinstance(error, InvalidKey):
            for column in self._columns.schema.key_columns:
                values = data.column(column.name)
                chosen |= pc.is_null(values).to_numpy() | unsound_rows(values, column=column.name)
        elif isinstance(error, InvalidValue) and error.encoded_key is not None:
            chosen = pc.equal(self._encoded(data), error.encoded_key).to_numpy(zero_copy_only=False)
            unsound = [unsound_rows(data.column(name), column=name) for name in data.column_names]
            of_both = chosen & np.logical_or.reduce(unsound)
            chosen = of_both if of_both.any() else chosen
        return int(np.argmax(chosen))


def without_unsound_rows(data: pa.Table) -> tuple[pa.Table, list[pa.Table]]:
    """Take out rows with a value that is not what its type says, in whatever column."""
    refused: list[pa.Table] = []
    if is_sound(data):
        return data, refused
    for name in data.column_names:
        unsound = unsound_rows(data.column(name), column=name)
        data, bad = _split(data, unsound, f"column '{name}' has {_UNSOUND}")
        refused += bad
    return data, refused


def without_deletes(data: pa.Table, operation: str) -> pa.Table:
    """Take out rows that delete; those whose operation is no known one are judged elsewhere."""
    unknown = _unknown_operations(data.column(operation))
    data = data.filter(pa.array(~unknown))
    return data.filter(pa.array(~read_deletes(data, operation)))


def _unknown_operations(values: pa.ChunkedArray) -> Flags:
    """Return which rows have an operation that is none; of a wrong type, the batch is judged."""
    if pa.types.is_integer(values.type):
        known = pc.is_in(values, pa.array(list(Operation), values.type))
    elif pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        known = pc.is_in(pc.utf8_lower(values.cast(pa.string())), pa.array(_OPERATIONS))
    else:
        return np.zeros(len(values), bool)
    return ~np.asarray(known.to_numpy(), bool)


def _split(
    data: pa.Table, bad: Flags, reason: str | pa.StringArray
) -> tuple[pa.Table, list[pa.Table]]:
    """Take the bad rows out; the reason is the same for all of them, or one for each."""
    if not bad.any():
        return data, []
    refused = data.filter(pa.array(bad))
    reasons = pa.repeat(reason, refused.num_rows) if isinstance(reason, str) else reason
    refused = refused.append_column(REASON, reasons)
    return data.filter(pa.array(~bad)), [refused]


def _failing(check: Callable[[pa.Array], object], values: pa.Array) -> Flags:
    """Return which values fail, found by halving; a type that never fits fails as a whole batch."""
    check(values.slice(0, 0))
    failing = np.zeros(len(values), bool)
    waiting = [(0, len(values))]
    while waiting:
        start, stop = waiting.pop()
        try:
            check(values.slice(start, stop - start))
        except InvalidInput:
            if stop - start == 1:
                failing[start] = True
            else:
                middle = (start + stop) // 2
                waiting += [(start, middle), (middle, stop)]
    return failing

"""Spark's DDL, as far as a table needs it: `name` and `type` of columns, read and written.

    column  :=  name [":"] type ["NOT" "NULL"] ["COMMENT" 'text']
    type    :=  word ["(" number ["," number] ")"]
             |  "ARRAY" "<" type ">"
             |  "MAP" "<" type "," type ">"
             |  "STRUCT" "<" column ("," column)* ">"

Words are case-insensitive. A name that is not plain letters, digits and underscores stands in
backticks, where two backticks mean one.
"""

import re
from dataclasses import dataclass

import pyarrow as pa

from foundation.errors import SchemaError
from foundation.suggestions import did_you_mean
from merge_engine.encoding.soundness import is_text

_TIMESTAMP = pa.timestamp("us", tz="UTC")

_PLAIN_TYPES = {
    "BOOLEAN": pa.bool_(),
    "TINYINT": pa.int8(),
    "BYTE": pa.int8(),
    "SMALLINT": pa.int16(),
    "SHORT": pa.int16(),
    "INT": pa.int32(),
    "INTEGER": pa.int32(),
    "BIGINT": pa.int64(),
    "LONG": pa.int64(),
    "FLOAT": pa.float32(),
    "REAL": pa.float32(),
    "DOUBLE": pa.float64(),
    "STRING": pa.string(),
    "BINARY": pa.binary(),
    "DATE": pa.date32(),
    "TIMESTAMP": _TIMESTAMP,
    "TIMESTAMP_LTZ": _TIMESTAMP,
    "TIMESTAMP_NTZ": pa.timestamp("us"),
}
_DECIMALS = ("DECIMAL", "DEC", "NUMERIC")
_SIZED_STRINGS = ("VARCHAR", "CHAR", "CHARACTER")
_NESTED = ("ARRAY", "MAP", "STRUCT")
_KNOWN = (*_PLAIN_TYPES, *_DECIMALS, *_SIZED_STRINGS, *_NESTED)

# The first spelling of a type above is the one that we write.
_NAMES = {data_type: name for name, data_type in reversed(_PLAIN_TYPES.items())}

# A name in backticks, a comment in quotes, a word or a number, or punctuation.
_TOKEN = re.compile(r"""\s*(`(?:[^`]|``)+`|'(?:[^']|'')*'|"[^"]*"|\w+|[<>(),:])""")
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# Far deeper than any real type, and far from Python's own limit on recursion.
_MAX_DEPTH = 64


@dataclass(frozen=True, kw_only=True)
class DdlColumn:
    """One column of a DDL list; `nullable` is False if it says NOT NULL."""

    name: str
    type: pa.DataType
    nullable: bool


def read_type(ddl: str) -> pa.DataType:
    """Read one type. SchemaError if the text is not one, naming the part that is wrong."""
    parser = _Parser(ddl)
    data_type = parser.type()
    parser.end()
    return data_type


def read_columns(ddl: str) -> tuple[DdlColumn, ...]:
    """Read a list of columns, as in `CREATE TABLE t (<here>)`."""
    parser = _Parser(ddl)
    columns = parser.columns()
    parser.end()
    return columns


def write_type(data_type: pa.DataType) -> str:
    """Return the DDL of a type; for a type that Spark does not have, Arrow's own name."""
    if data_type in _NAMES:
        return _NAMES[data_type]
    if pa.types.is_decimal128(data_type):
        return f"DECIMAL({data_type.precision},{data_type.scale})"
    if pa.types.is_map(data_type):
        return f"MAP<{write_type(data_type.key_type)}, {write_type(data_type.item_type)}>"
    if pa.types.is_list(data_type):
        return f"ARRAY<{write_type(data_type.value_type)}>"
    if pa.types.is_struct(data_type):
        fields = [f"{write_name(field.name)}: {write_type(field.type)}" for field in data_type]
        return f"STRUCT<{', '.join(fields)}>"
    return str(data_type)


def write_name(name: str) -> str:
    """Return a name as it stands in DDL, in backticks where it needs them."""
    return name if _PLAIN_NAME.fullmatch(name) else "`" + name.replace("`", "``") + "`"


class _Parser:
    """Recursive descent over the tokens of one text."""

    def __init__(self, ddl: str) -> None:
        if not isinstance(ddl, str):
            raise SchemaError(f"a DDL is a text, not {ddl!r}")
        self._ddl = ddl
        self._tokens: list[str] = []
        self._position = 0
        self._depth = 0
        end, length = 0, len(ddl.rstrip())
        while end < length:
            match = _TOKEN.match(ddl, end)
            if match is None:
                raise self._error(f"cannot read {ddl[end:].strip()!r}")
            self._tokens.append(match[1])
            end = match.end()

    def end(self) -> None:
        if self._peek():
            raise self._error(f"{self._peek()!r} was not expected")

    def columns(self) -> tuple[DdlColumn, ...]:
        columns = [self._column()]
        while self._accept(","):
            columns.append(self._column())
        return tuple(columns)

    def type(self) -> pa.DataType:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._error(f"nested more than {_MAX_DEPTH} deep")
        word = self._next("a type").upper()
        if word in _PLAIN_TYPES:
            data_type = _PLAIN_TYPES[word]
        elif word in _DECIMALS:
            data_type = self._decimal()
        elif word in _SIZED_STRINGS:
            # Spark pads and checks lengths when it writes; a table keeps what it is given.
            self._numbers(1)
            data_type = pa.string()
        elif word in _NESTED:
            data_type = self._nested(word)
        else:
            hint = did_you_mean(word, _KNOWN) or f"; use one of {', '.join(sorted(_KNOWN))}"
            if word == "INTERVAL":
                hint = "; use INT with the months, or BIGINT with the microseconds"
            raise self._error(f"unknown type {word!r}{hint}")
        self._depth -= 1
        return data_type

    def _nested(self, word: str) -> pa.DataType:
        self._expect("<")
        if word == "ARRAY":
            data_type = pa.list_(self.type())
        elif word == "MAP":
            key_type = self.type()
            self._expect(",")
            data_type = pa.map_(key_type, self.type())
        else:
            data_type = pa.struct([(column.name, column.type) for column in self.columns()])
        self._expect(">")
        return data_type

    def _decimal(self) -> pa.DataType:
        numbers = self._numbers(2) if self._peek() == "(" else []
        precision, scale = [*numbers, *(10, 0)[len(numbers) :]]
        if not (1 <= precision <= 38 and scale <= precision):
            raise self._error(
                f"DECIMAL({precision},{scale}) needs a precision of 1 to 38"
                " and a scale of 0 to the precision"
            )
        return pa.decimal128(precision, scale)

    def _numbers(self, most: int) -> list[int]:
        """Read "(n)" or, if `most` is 2, "(n, m)" as well."""
        self._expect("(")
        numbers = [self._number()]
        while len(numbers) < most and self._accept(","):
            numbers.append(self._number())
        self._expect(")")
        return numbers

    def _number(self) -> int:
        token = self._next("a number")
        if not (token.isascii() and token.isdigit()):
            raise self._error(f"{token!r} is not a number")
        return int(token)

    def _column(self) -> DdlColumn:
        name = self._next("a name")
        if name.startswith("`"):
            name = name[1:-1].replace("``", "`")
        elif not name.isidentifier() and not name.isalnum():
            raise self._error(f"{name!r} is not a name; put it in backticks")
        if not is_text(name):
            raise self._error(f"{name!r} has half a character in it")
        self._accept(":")
        data_type = self.type()
        not_null = self._accept("NOT")
        if not_null:
            self._expect("NULL")
        if self._accept("COMMENT"):
            self._next("the text of the comment")
        return DdlColumn(name=name, type=data_type, nullable=not not_null)

    def _peek(self) -> str:
        return self._tokens[self._position] if self._position < len(self._tokens) else ""

    def _next(self, wanted: str) -> str:
        token = self._peek()
        if not token:
            raise self._error(f"{wanted} is missing at the end")
        self._position += 1
        return token

    def _accept(self, word: str) -> bool:
        found = self._peek().upper() == word
        self._position += found
        return found

    def _expect(self, word: str) -> None:
        if not self._accept(word):
            raise self._error(f"{word!r} was expected, not {self._peek() or 'the end'!r}")

    def _error(self, reason: str) -> SchemaError:
        return SchemaError(f"cannot read {self._ddl!r}: {reason}")

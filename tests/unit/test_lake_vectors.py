"""Deletion vectors and their letters: as Delta has them, or refused; never something else."""

import struct
import uuid
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap64

from foundation.errors import CorruptLake
from sink.lake.letters import from_letters, id_of, to_letters
from sink.lake.state import LakeFile, step_of, vectors_id, vectors_name
from sink.lake.vectors import read_vector, write_vectors
from tests.support.lakes import a_file

NAMED = uuid.UUID("61d16c75-6994-46b7-a15b-8b538852e50e")
POSITIONS = st.sets(
    st.one_of(st.integers(0, 300), st.integers(2**32 - 3, 2**32 + 3), st.integers(0, 2**40)),
    max_size=50,
)


def reading(data: bytes | bytearray) -> Callable[[str], bytes]:
    """Return what reads an object with these bytes."""
    return lambda _: bytes(data)


def told_of(file: LakeFile) -> Mapping[str, Any]:
    assert file.told is not None
    return file.told


# Letters


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (bytes.fromhex("864fd26fb559f75b"), "HelloWorld"),  # ZeroMQ's own example.
        (uuid.UUID("d2c639aa-8816-431a-aaf6-d3fe2512ff61").bytes, "^-aqEH.-t@S}K{vb[*k^"),
        (uuid.UUID("61d16c75-6994-46b7-a15b-8b538852e50e").bytes, "vBn[lx{q8@P<9BNH/isA"),
        (uuid.UUID("a52eda8c-0a57-4636-814b-9c165388f7ca").bytes, "R7QFX3rGXPFLhHGq&7g<"),
        (b"", ""),
    ],
)
def test_bytes_have_the_letters_that_others_give_them(data: bytes, text: str) -> None:
    assert to_letters(data) == text
    assert from_letters(text) == data


def test_an_id_may_have_a_prefix() -> None:
    assert str(id_of("ab^-aqEH.-t@S}K{vb[*k^")) == "d2c639aa-8816-431a-aaf6-d3fe2512ff61"


@given(st.binary(max_size=40))
def test_bytes_come_back_from_their_letters(data: bytes) -> None:
    assert from_letters(to_letters(data)) == data + bytes(-len(data) % 4)


@pytest.mark.parametrize("letter", [*"\"',;_`|~\\ ", "\u00fc", "\n"])
def test_other_letters_are_refused(letter: str) -> None:
    with pytest.raises(ValueError, match=r"letters|base85"):
        from_letters(f"HelloWorl{letter}")


# Vectors


def test_what_spark_has_written_into_a_log_is_read() -> None:
    """A vector that Delta's own writer has put into a log, of rows 1, 3 and 5."""
    inline = from_letters("^Bg9^0rr910000000000iXQKl0rr91000625c8Xg0rri41POJ5")[:38]
    [told], data = write_vectors([a_file(10, dead=[1, 3, 5])], NAMED)
    assert data is not None
    assert data[5:43] == inline
    framed = b"\x01" + struct.pack(">I", 38) + inline + struct.pack(">I", zlib.crc32(inline))
    assert data == framed
    assert told.told == {
        "storageType": "u",
        "pathOrInlineDv": "vBn[lx{q8@P<9BNH/isA",
        "offset": 1,
        "sizeInBytes": 38,
        "cardinality": 3,
    }


@given(st.lists(POSITIONS, max_size=5))
def test_the_vectors_of_a_commit_are_read_from_one_object(dead: list[set[int]]) -> None:
    files = [a_file(2**40 + 1, dead=one) for one in dead]
    told, data = write_vectors(files, NAMED)
    assert (data is None) == (not any(dead))
    objects = {vectors_name(NAMED): data}
    assert [one.name for one in told] == [one.name for one in files]
    for one, file in zip(told, files, strict=True):
        assert (one.told is None) == (not file.dead)
        assert one.dead == file.dead
        assert read_vector(one.told, lambda name: objects[name] or b"") == file.dead


@given(POSITIONS.filter(bool))
def test_a_vector_is_laid_out_as_the_protocol_says(dead: set[int]) -> None:
    """Number of 32-bit bitmaps, then each with its upper half: the lower halves are Roaring's."""
    _, data = write_vectors([a_file(dead=dead)], NAMED)
    assert data is not None
    assert data[5:9] == (1681511377).to_bytes(4, "little")
    uppers = sorted({one >> 32 for one in dead})
    assert struct.unpack_from("<Q", data, 9) == (len(uppers),)
    assert struct.unpack_from("<I", data, 17) == (uppers[0],)


def test_an_object_that_is_damaged_anywhere_never_gives_other_rows() -> None:
    files = [a_file(dead=[1, 2, 70_000]), a_file(), a_file(dead=[2**33, 2**33 + 1])]
    told, data = write_vectors(files, NAMED)
    assert data is not None
    for one, file in zip(told, files, strict=True):
        if one.told is None:
            continue
        at, size = one.told["offset"], one.told["sizeInBytes"]
        for position in range(len(data)):
            for flip in (1, 0x80, 0xFF):
                damaged = bytearray(data)
                damaged[position] ^= flip
                if position == 0 or at <= position < at + size + 8:
                    with pytest.raises(CorruptLake, match="deletion_vector_61d16c75"):
                        read_vector(one.told, reading(damaged))
                else:
                    assert read_vector(one.told, reading(damaged)) == file.dead
        for length in range(at + size + 8):
            with pytest.raises(CorruptLake):
                read_vector(one.told, reading(data[:length]))


@pytest.mark.parametrize(
    "wrong",
    [
        {"offset": 2},
        {"offset": 10**9},
        {"offset": None},
        {"sizeInBytes": 37},
        {"sizeInBytes": 10**6},
        {"cardinality": 4},
        {"storageType": "i"},
        {"storageType": "p"},
        {"pathOrInlineDv": "short"},
        {"pathOrInlineDv": "~~~~~~~~~~~~~~~~~~~~"},
    ],
)
def test_a_log_that_says_something_else_of_a_vector_is_corrupt(wrong: dict[str, Any]) -> None:
    [file], data = write_vectors([a_file(dead=[1, 3, 5])], NAMED)
    with pytest.raises(CorruptLake):
        read_vector({**told_of(file), **wrong}, lambda _: data or b"")


def test_no_vector_is_no_dead_rows_and_nothing_is_read() -> None:
    assert read_vector(None, lambda _: pytest.fail("something is read")) == BitMap64()
    assert write_vectors([a_file(), a_file()], NAMED)[1] is None
    assert write_vectors([], NAMED) == ((), None)


def test_what_the_log_said_before_of_a_file_without_dead_rows_is_not_repeated() -> None:
    [file], _ = write_vectors([a_file(told={"storageType": "u"})], NAMED)
    assert file.told is None


# Names


@given(st.integers(0, 2**63))
def test_an_object_with_vectors_says_of_which_step_it_is(step: int) -> None:
    first, other = vectors_id(step), vectors_id(step)
    assert first != other
    assert step_of(vectors_name(first)) == step_of(vectors_name(other)) == step


@pytest.mark.parametrize(
    "name",
    [
        "deletion_vector_61d16c75-6994-46b7-a15b-8b538852e50e.bin.tmp",
        "deletion_vector_61d16c75-6994-46b7-a15b.bin",
        "deletion_vector_61d16c75-6994-46b7-a15b-8b538852e50e0.bin",
        "deletion_vector_61D16C75-6994-46b7-a15b-8b538852e50e.bin",
        "part-00000-61d16c75-6994-46b7-a15b-8b538852e50e.c000.snappy.parquet",
        "0-0-000000000000-61d16c75699446b7a15b8b538852e50e.parquet.crc",
        "0-0-0-61d16c75699446b7a15b8b538852e50e.parquet",
        "README.md",
        "",
    ],
)
def test_a_name_that_is_none_of_ours_has_no_step(name: str) -> None:
    assert step_of(name) is None

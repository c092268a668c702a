"""The bytes of a manifest: what was written is read back, and nothing else is."""

import struct
from dataclasses import replace

import pytest
import xxhash

from foundation.errors import CorruptSnapshot, InvalidInput, UnknownFormat
from merge_engine.bucket.snapshot_manifest import (
    Manifest,
    SnapshotFile,
    content_of,
    data_name,
    decode_manifest,
    encode_manifest,
    is_manifest,
    manifest_name,
    term_of,
)

OBJECT = data_name(content_of(b"rows"), 5)
MANIFEST = Manifest(
    snapshot_id=7,
    term=5,
    identity="tä/0",
    applied=100,
    stable=90,
    created_ms=1_700_000_000_000,
    schema_version=3,
    files=(SnapshotFile("000008.sst", OBJECT, 4), SnapshotFile("CURRENT", OBJECT, 4)),
)


def sealed(framed: bytes) -> bytes:
    return framed + struct.pack("<Q", xxhash.xxh3_64_intdigest(framed))


def test_a_manifest_is_read_back_as_it_was_written() -> None:
    assert decode_manifest("7-5.manifest", encode_manifest(MANIFEST)) == MANIFEST


def test_the_layout_is_the_documented_one() -> None:
    data = encode_manifest(replace(MANIFEST, files=()))
    assert data[:10] == b"TALLYSNP\x02\x00"
    assert data[10:-8] == (
        b'{"snapshot_id":7,"term":5,"identity":"t\\u00e4/0","applied":100,"stable":90,'
        b'"created_ms":1700000000000,"schema_version":3,"files":[]}'
    )


def test_every_byte_that_is_flipped_and_every_cut_is_found() -> None:
    data = encode_manifest(MANIFEST)
    for at in range(len(data)):
        damaged = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        for bad in (damaged, data[:at]):
            with pytest.raises(CorruptSnapshot, match=r"manifest 7-5\.manifest: "):
                decode_manifest("7-5.manifest", bad)


def test_a_manifest_under_another_name_is_refused() -> None:
    with pytest.raises(CorruptSnapshot, match="renamed or swapped"):
        decode_manifest("7-6.manifest", encode_manifest(MANIFEST))


def test_a_later_format_is_not_guessed_at() -> None:
    data = bytearray(encode_manifest(MANIFEST)[:-8])
    data[8] = 3
    with pytest.raises(UnknownFormat, match=r"of format 3, this release reads 1 and 2; .*upgrade"):
        decode_manifest("7-5.manifest", sealed(bytes(data)))


@pytest.mark.parametrize("body", [b"[]", b"{}", b'{"files":[[1]]}', b"\xff", b'{"files":5}'])
def test_a_body_that_is_no_manifest_is_refused_although_its_checksum_holds(body: bytes) -> None:
    with pytest.raises(CorruptSnapshot, match="the checksum holds, but"):
        decode_manifest("7-5.manifest", sealed(b"TALLYSNP\x01\x00" + body))


@pytest.mark.parametrize("name", ["", ".", "..", "../view", "/etc/passwd", "a\0b"])
def test_a_file_cannot_lead_out_of_its_directory(name: str) -> None:
    with pytest.raises(InvalidInput, match="is not the name of a file"):
        replace(MANIFEST, files=(SnapshotFile(name, OBJECT, 4),))


def test_what_cannot_be_a_snapshot_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"stable up to offset 101 .* below 100"):
        replace(MANIFEST, stable=101)
    with pytest.raises(InvalidInput, match="whole, from 0 on"):
        replace(MANIFEST, snapshot_id=-1)
    with pytest.raises(InvalidInput, match="CURRENT is there twice"):
        replace(MANIFEST, files=MANIFEST.files[1:] * 2)
    with pytest.raises(InvalidInput, match="is not a file of a snapshot"):
        replace(MANIFEST, files=(SnapshotFile("CURRENT", "elsewhere", 4),))


def test_the_names_of_objects_tell_what_they_are_and_who_made_them() -> None:
    assert (manifest_name(7, 5), is_manifest("7-5.manifest"), is_manifest(OBJECT)) == (
        "7-5.manifest",
        True,
        False,
    )
    assert [term_of(name) for name in ("7-5.manifest", OBJECT, "notes.txt", "5")] == [
        5,
        5,
        None,
        None,
    ]

"""Tokens: a batch that is put again changes nothing and returns the first result."""

import pytest

from foundation.failpoints import arm
from foundation.ids import Token
from merge_engine.bucket.options import BucketOptions
from merge_engine.bucket.write_behind import WriteBehind
from tests.conftest import BucketFactory, batch, rows_of
from tests.support.buckets import EAGER, add
from tests.support.faulty_storage import interrupt


def test_a_repeated_token_changes_nothing_and_returns_the_first_result(
    bucket_factory: BucketFactory,
) -> None:
    bucket = bucket_factory()
    token = Token(epoch=3, batch=8)
    first = bucket.put(batch(k=[1, 2], a=[1, 2]), owner="me", token=token)
    assert (first.base_offset, first.end_offset, first.repeated) == (1, 3, False)
    bucket.put(batch(k=[1], b=[9]), owner="other", token=Token(4, 8))
    for data in (batch(k=[1, 2], a=[1, 2]), batch(k=[7], a=[100]), batch(k=[1], b=[100])):
        again = bucket.put(data, owner="me", token=token)
        assert (again.base_offset, again.end_offset, again.repeated) == (1, 3, True)
    assert rows_of(bucket) == {1: (1, 9), 2: (2, None)}
    assert bucket.end_offset == 4


@pytest.mark.parametrize("options", [None, EAGER])
@pytest.mark.parametrize("crash", [False, True])
def test_a_token_is_remembered_when_the_bucket_is_opened_again(
    bucket_factory: BucketFactory, options: BucketOptions | None, crash: bool
) -> None:
    bucket = bucket_factory(options=options)
    add(bucket, [1], [1], owner="me", token=Token(1, 1))
    add(bucket, [1], [1], owner="you", token=Token(2, 1))
    name = bucket_factory.crash(into="copy") if crash else "bucket"
    bucket.close()
    bucket = bucket_factory(name=name)
    last = bucket.last_token("me")
    assert last is not None
    assert (last.token, last.base_offset, last.end_offset) == (Token(1, 1), 1, 2)
    assert bucket.put(batch(k=[1], a=[5]), owner="me", token=Token(1, 1)).repeated
    assert bucket.put(batch(k=[1], a=[5]), owner="you", token=Token(2, 1)).repeated
    assert bucket.last_token("nobody") is None
    assert rows_of(bucket) == {1: (2, None)}


def test_the_token_reaches_rocksdb_in_the_same_write_as_the_offset(
    bucket_factory: BucketFactory,
) -> None:
    """Else a crash between the two would have the rows without the token, and count twice."""
    bucket = bucket_factory(options=EAGER)

    def crash() -> None:
        bucket._view._database.flush()  # RocksDB does so by itself when its memory is full.
        bucket_factory.crash(into="copy")

    with arm("view.written", crash):
        add(bucket, [1], [1], owner="me", token=Token(1, 1))
    copy = bucket_factory(name="copy")
    assert copy.put(batch(k=[1], a=[1]), owner="me", token=Token(1, 1)).repeated
    assert rows_of(copy) == {1: (1, None)}


def test_the_token_reaches_rocksdb_with_the_offset_in_a_replay_too(
    bucket_factory: BucketFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = bucket_factory()
    add(bucket, [1], [1], owner="me", token=Token(1, 1))
    bucket_factory.crash(into="copy")
    copies: list[str] = []
    write = WriteBehind.write

    def write_and_crash(behind: WriteBehind) -> None:
        write(behind)
        behind.writer._database.flush()
        copies.append(bucket_factory.crash("copy", into=f"copy-{len(copies)}"))

    with monkeypatch.context() as patch:
        patch.setattr(WriteBehind, "write", write_and_crash)
        bucket_factory(name="copy", options=EAGER).close()
    assert len(copies) > 2
    for name in copies:
        reopened = bucket_factory(name=name)
        assert reopened.put(batch(k=[1], a=[1]), owner="me", token=Token(1, 1)).repeated


@pytest.mark.parametrize("failpoint", ["put.logged", "put.applied", "view.before_write"])
def test_a_put_that_is_interrupted_after_its_commit_is_repeated_when_called_again(
    bucket_factory: BucketFactory, failpoint: str
) -> None:
    bucket = bucket_factory(options=EAGER)
    with arm(failpoint, interrupt), pytest.raises(KeyboardInterrupt):
        add(bucket, [1], [1], owner="me", token=Token(1, 1))
    assert bucket.put(batch(k=[1], a=[1]), owner="me", token=Token(1, 1)).repeated
    assert rows_of(bucket) == {1: (1, None)}


def test_an_older_token_is_not_taken_for_a_repeated_one(bucket_factory: BucketFactory) -> None:
    bucket = bucket_factory()
    add(bucket, [1], [1], owner="me", token=Token(1, 1))
    add(bucket, [1], [1], owner="me", token=Token(1, 2))
    assert not bucket.put(batch(k=[1], a=[1]), owner="me", token=Token(1, 1)).repeated
    assert rows_of(bucket) == {1: (3, None)}


def test_the_same_token_of_another_owner_is_another_one(bucket_factory: BucketFactory) -> None:
    bucket = bucket_factory()
    add(bucket, [1], [1], owner="me", token=Token(1, 1))
    assert not bucket.put(batch(k=[1], a=[1]), owner="you", token=Token(1, 1)).repeated
    assert not bucket.put(batch(k=[1], a=[1])).repeated
    assert rows_of(bucket) == {1: (3, None)}


def test_a_token_that_changed_nothing_is_remembered_even_after_a_crash(
    bucket_factory: BucketFactory,
) -> None:
    bucket = bucket_factory()
    add(bucket, [1], [1])
    first = bucket.put(batch(k=[1], a=[0]), owner="me", token=Token(1, 1))
    assert (first.changed, first.repeated) == (0, False)
    assert [segment.changes for segment in bucket.read_log(first.base_offset)] == [{}]
    crashed = bucket_factory(name=bucket_factory.crash(into="copy"))
    for opened in (bucket, crashed):
        again = opened.put(batch(k=[1], a=[7]), owner="me", token=Token(1, 1))
        assert (again.changed, again.repeated) == (0, True)
        assert (again.base_offset, again.end_offset) == (first.base_offset, first.end_offset)
        assert rows_of(opened) == {1: (1, None)}

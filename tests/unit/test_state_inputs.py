"""States that come in are stored as they would be if their rows had come here, or are refused."""

from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from datasketches import hll_sketch, tgt_hll_type, update_theta_sketch
from pyroaring import BitMap, BitMap64

from foundation.errors import BatchTooLarge, InvalidValue, Overflow
from merge_engine.aggregates import gathered
from merge_engine.aggregates.base import Fault
from merge_engine.bucket.segment import AggMode
from merge_engine.schema.builder import SchemaBuilder
from recovery.embedded.table import Table
from tests.support.aggregates import build

Tables = Callable[..., Table]
LONGS = pa.list_(pa.int64())
STATES = (AggMode.MERGE_STATE, AggMode.REPLACE)


@pytest.fixture
def table_of(tmp_path: Path) -> Iterator[Tables]:
    made: list[Table] = []

    def create(kind: pa.DataType, function: str, **parameters: Any) -> Table:
        builder = SchemaBuilder().column("k", "BIGINT").agg_column("n", "BIGINT", "count")
        schema = builder.agg_column("v", kind, function, **parameters).primary_key("k").build()
        made.append(Table.create(tmp_path / str(len(made)), schema, buckets=1))
        return made[-1]

    yield create
    for table in made:
        table.close()


def values(table: Table) -> list[Any]:
    return [row["v"] for row in sorted(table.to_arrow().to_pylist(), key=lambda row: row["k"])]


@pytest.mark.parametrize("mode", STATES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("keys", [[1, 2], [2, 1], [1, 1]], ids=["rising", "falling", "repeated"])
def test_a_limit_is_applied_to_states_whatever_the_order_of_their_rows(
    table_of: Tables, mode: AggMode, keys: list[int]
) -> None:
    longs = table_of(LONGS, "array_agg", limit=3)
    longs.put(pa.table({"k": keys, "v": [[1, 2, 3, 4]] * 2}), mode=mode)
    assert values(longs) == [[2, 3, 4]] * len(set(keys))
    longs.put({"k": [1], "v": [9]})
    assert values(longs)[0] == [3, 4, 9]
    texts = table_of(pa.string(), "string_agg", limit=3)
    texts.put(pa.table({"k": keys, "v": [list("abcd")] * 2}), mode=mode)
    assert values(texts) == ["b,c,d"] * len(set(keys))
    texts.put({"k": [1], "v": ["z"]})
    assert values(texts)[0] == "c,d,z"


@pytest.mark.parametrize("mode", STATES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("keys", [[1, 2], [2, 1], [1, 1]], ids=["rising", "falling", "repeated"])
def test_a_set_beyond_its_limit_is_refused_and_its_key_can_be_written(
    table_of: Tables, mode: AggMode, keys: list[int]
) -> None:
    table = table_of(LONGS, "collect_set", limit=3)
    with pytest.raises(Overflow, match=r"'v', key k=\d: the set grows past its limit of 3 values"):
        table.put(pa.table({"k": keys, "v": [[1, 2, 3, 4]] * 2}), mode=mode)
    table.put(pa.table({"k": keys, "v": [[1, 2, 3]] * 2}), mode=mode)
    table.put({"k": [1], "v": [3]})
    assert values(table) == [[1, 2, 3]] * len(set(keys))


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        (pa.decimal128(10, 2), {"sum": Decimal(10) ** 20, "count": 0}),
        (pa.decimal128(10, 2), {"sum": Decimal(10) ** 20, "count": 1}),
        (pa.decimal128(10, 2), {"sum": Decimal(-1), "count": 0}),
        (pa.float64(), {"sum": 1.5, "count": 0}),
    ],
)
def test_an_average_that_nobody_could_read_is_refused_and_the_table_stays_whole(
    table_of: Tables, kind: pa.DataType, state: dict[str, Any]
) -> None:
    table = table_of(kind, "avg")
    table.put(pa.table({"k": [1, 2], "v": pa.array([Decimal(1)] * 2).cast(kind), "n": [1, 1]}))
    states = pa.array([state], build("avg", kind).state_type)
    with pytest.raises(InvalidValue, match=r"column 'v', key k=2: a state of avg"):
        table.put(pa.table({"k": [2], "v": states}), mode=AggMode.MERGE_STATE)
    assert values(table) == [1, 1]
    assert sum(batch.num_rows for batch in table.changelog(table.bucket_ids()[0], 0)) == 2


def test_an_average_that_an_earlier_version_stored_reads_as_null() -> None:
    function = build("avg", pa.decimal128(10, 2))
    stored = [{"sum": Decimal(10) ** 20, "count": count} for count in (0, 1)]
    good = {"sum": Decimal(3), "count": 2}
    states = pa.array([*stored, good, None], function.state_type)
    assert function.finish(states).to_pylist() == [None, None, Decimal("1.50"), None]


@pytest.mark.parametrize(("name", "kind"), [("rbm32", BitMap), ("rbm64", BitMap64)])
def test_a_bitmap_is_stored_in_one_form_and_nothing_after_it(
    table_of: Tables, name: str, kind: Any
) -> None:
    numbers = [*range(1000), 70_000, 2**31 - 1]
    bitmap = kind()
    for number in numbers:  # Not optimised for runs, as other libraries leave it.
        bitmap.add(number)
    table = table_of(pa.binary(), name)
    table.put({"k": [1] * len(numbers), "v": numbers})
    states = pa.array([bitmap.serialize(), kind().serialize()], pa.binary())
    table.put(pa.table({"k": [2, 3], "v": states}), mode=AggMode.MERGE_STATE)
    own, other, empty = values(table)
    assert own == other != bitmap.serialize()
    assert empty is None
    with pytest.raises(InvalidValue, match=f"state of {name} cannot be taken: 4 bytes follow it"):
        table.put({"k": [4], "v": [bitmap.serialize() + b"junk"]}, mode=AggMode.MERGE_STATE)


COUNTS = [0, 1, 7, 8, 30, 100, 3000, 60_000]


@pytest.mark.parametrize("lg_k", [5, 12])
@pytest.mark.parametrize("kind", ["HLL_4", "HLL_6", "HLL_8"])
def test_an_hll_sketch_of_the_library_is_stored_as_if_its_values_had_come(
    kind: str, lg_k: int
) -> None:
    function = build("hll_sketch", pa.binary(), lg_k=lg_k)
    for count in COUNTS:
        sketch = hll_sketch(lg_k, getattr(tgt_hll_type, kind))
        for value in range(count):
            sketch.update(value)
        numbers = pa.array([*range(count), None], pa.int64())
        own = function.accumulate(numbers, None, np.array([0]))
        written = [sketch.serialize_compact(), sketch.serialize_updatable()]
        states = pa.array([own[0].as_py(), *map(bytes, written)], pa.binary())
        assert function.accept(states).unique() == own


@pytest.mark.parametrize("lg_k", [5, 12])
@pytest.mark.parametrize("more", [0, 2])
def test_a_theta_sketch_of_the_library_is_stored_as_if_its_values_had_come(
    lg_k: int, more: int
) -> None:
    function = build("theta_sketch", pa.binary(), lg_k=lg_k)
    for count in COUNTS:
        sketch = update_theta_sketch(lg_k + more)  # A larger one is cut down.
        for value in range(count):
            sketch.update(value)
        numbers = pa.array([*range(count), None], pa.int64())
        own = function.accumulate(numbers, None, np.array([0]))
        written = [sketch.compact(ordered).serialize() for ordered in (True, False)]
        assert function.accept(pa.array(map(bytes, written), pa.binary())).unique() == own


# As Spark 4.3 writes them: hll_sketch_agg(v, 4) and theta_sketch_agg(v, 5), of 0, 7919, 15838 ...
SPARK = {
    "hll_sketch": {
        0: "02010704030400080000000000000000000000000000000000000000000000000000000000000000",
        1: "0201070403000108cbd7c20400000000000000000000000000000000000000000000000000000000",
        3: "0201070403000308cbd7c204c1832713f9dcbe090000000000000000000000000000000000000000",
        40: (
            "0a0107040000000aaad16c940a2549400000000000a00b4000000000000000000100000000000000"
            "02040501060305050005020203010303"
        ),
    },
    "theta_sketch": {
        0: "01030300001e0000",
        1: "01030300003acc93e56b61eec8804420",
        3: "0104033c011acc9303de139c3f0df6e7cf086f3550b4536435ad7cfaccdaa050",
        40: (
            "0204033c011acc9377f75e76bec61a6b20644f86d281d09a529bfd40b4b758fd5004416140b0bda0"
            "635055144f0bfc07760726bf7ec32095092e8c353fba0b875119b036636031f04956dade10169fde"
            "a2082f0de11cbec595d353dba2793349c03927d35ad7cfaccdaa0580981326d52dc421d850d60130"
            "fbc0201cd21f0338c940e29568137353004cdc6011c43a67256d92f94a1e780e0efc0ffc06ae7953"
            "55358d8c5beba61a02c107b4b8b90564281c4846131c3427bd315aec6495cc95af801b33e0655281"
            "6a0c6fcb82f9e1cb2896ae5c0d1d7dc4446032a089f967bd43f7b078e1a28b3da894442fc16d6c75"
            "d56b01cfc978420f607178410a833930a1"
        ),
    },
}


@pytest.mark.parametrize("name", SPARK)
def test_a_sketch_of_spark_is_stored_as_if_its_values_had_come(name: str) -> None:
    function = build(name, pa.binary(), lg_k=4 if name == "hll_sketch" else 5)
    for count, written in SPARK[name].items():
        numbers = pa.array([*range(0, 7919 * count, 7919), None], pa.int64())
        own = function.accumulate(numbers, None, np.array([0]))
        assert function.accept(pa.array([bytes.fromhex(written)])) == own


def test_a_sketch_that_cannot_be_taken_says_why() -> None:
    theta = update_theta_sketch(12)
    theta.update(1)
    written = bytearray(theta.compact().serialize())
    seed, version, big = bytearray(written), bytearray(written), bytearray(written)
    seed[6] ^= 1
    version[1] = 2
    big[5] |= 1
    hll = bytes(hll_sketch(12).serialize_compact())
    for name, state, why in (
        ("theta_sketch", seed, "made with another seed"),
        ("theta_sketch", version, "of another version; serialize it as version 3 or 4"),
        ("theta_sketch", big, "of another version"),
        ("theta_sketch", hll, "it is an HLL sketch, not a compact theta sketch"),
        ("hll_sketch", written, "it is a theta sketch, not an HLL sketch"),
        ("hll_sketch", hll_sketch(11).serialize_compact(), "lg_k = 11, its column 12"),
        ("hll_sketch", b"no sketch", "it is no HLL sketch"),
    ):
        function = build(name, pa.int64())
        with pytest.raises(Fault, match=f"a state of {name} cannot be taken: .*{why}"):
            function.accept(pa.array([bytes(state)], pa.binary()))


def test_a_text_that_no_column_of_arrow_holds_is_refused_where_it_would_come_about(
    table_of: Tables,
) -> None:
    table = table_of(pa.string(), "string_agg", delimiter="d" * 1300)
    half = pa.table({"k": np.full(900_000, 7), "v": pa.array(["a"]).take([0] * 900_000)})
    table.put(half)
    for _ in range(2):
        with pytest.raises(Overflow, match=r"'v', key k=7: the text grows to 2,341,798,700 bytes"):
            table.put(half)
    table.put({"k": [7], "n": [1]})
    assert table.lookup({"k": [7]}, ["n"])["n"].to_pylist() == [1]


def test_texts_that_are_too_long_together_are_for_the_reader_to_ask_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gathered, "_LONGEST_TEXT", 10)
    function = build("string_agg", pa.string(), delimiter="--")
    states = pa.array([["abc", "def"], None, ["abcdef"]], function.state_type)
    assert function.accept(states).equals(states)
    with pytest.raises(BatchTooLarge, match="14 bytes in one column; read fewer rows at a time"):
        function.finish(states)
    assert function.finish(states[:2]).to_pylist() == ["abc--def", None]
    newer = pa.array([["a"], None, ["xyz"]], function.state_type)
    with pytest.raises(Fault, match="grows to 11 bytes, beyond the 2 GiB of a STRING") as caught:
        function.combine(states, newer)
    assert (caught.value.index, caught.value.overflow) == (0, True)

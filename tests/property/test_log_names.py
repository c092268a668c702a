"""A bucket's log among strays: objects that came to names which were freed, whoever created them.

Leaders put, roll up and clean, are deposed without knowing it, and are in doubt about creates that
arrive late; followers lag, lead, and leave their views to others. Before any request to the store,
of anybody, another process may take the lead and roll the log up, or clean it, and a stray may come
to any name that is free by then. What is the log's is what was created first at each offset, one
after the other: nobody ever reads anything else, and nothing of it is ever missing.
"""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import BinaryIO, NamedTuple

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from foundation.errors import AlreadyExists, Deposed, LogGap, OffsetOutOfRange, UnknownOutcome
from merge_engine.bucket.bucket import Bucket
from merge_engine.bucket.follower import Follower
from merge_engine.bucket.log import Log
from merge_engine.bucket.log_names import LogNames
from merge_engine.bucket.masked_rows import finished_rows
from merge_engine.bucket.options import BucketOptions
from merge_engine.bucket.segment import (
    Segment,
    SegmentKind,
    decode_segment,
    encode_segment,
    segment_name,
)
from merge_engine.encoding.stored_rows import SchemaHistory
from tests.conftest import SUMS, rows_of
from tests.support.buckets import add
from tests.support.rolling import roll_up
from tests.support.snapshot_world import MemoryStorage, Objects
from tests.support.strays import leave_stray

EXAMPLES = int(os.environ.get("TALLYBOOK_EXAMPLES", "10"))
HISTORY = SchemaHistory([SUMS])
OPTIONS = BucketOptions(roll_up_segments=2, block_cache_bytes=1 << 20)
KEYS = range(4)
# Others act so often within a rule: else the log never holds still for somebody who looks.
ACTS = 5
seeds = st.integers(0, 99_999)


class Unquiet(MemoryStorage):
    """The store as a process sees it: others act before each of its requests."""

    def __init__(
        self, objects: Objects, act: Callable[[], None], late: list[tuple[str, bytes]]
    ) -> None:
        super().__init__(objects)
        self._act = act
        # Of the next creates: whether it is done, and the answer is lost; None: it comes late.
        self.unknown: list[bool | None] = []
        self._late = late

    def create(self, name: str, data: bytes) -> None:
        self._act()
        if not self.unknown:
            super().create(name, data)
            return
        done = self.unknown.pop(0)
        if done:
            super().create(name, data)
        elif done is None:
            self._late.append((name, data))
        raise UnknownOutcome(f"{name}: no answer")

    def read(self, name: str) -> bytes:
        self._act()
        return super().read(name)

    def open(self, name: str) -> BinaryIO:
        self._act()
        return super().open(name)

    def names(self) -> list[str]:
        """Return the names page by page, as a store does: others act between two of them."""
        found: list[str] = []
        while page := [name for name in super().names() if not found or name > found[-1]][:5]:
            found += page
            self._act()
        return found

    def sizes(self) -> dict[str, int]:
        now = {name: self.objects.now.get(name) for name in self.names()}
        return {name: len(data) for name, data in now.items() if data is not None}


class Leading(NamedTuple):
    """A leader, or who believes so, with the store as it sees it."""

    storage: Unquiet
    bucket: Bucket


class Following(NamedTuple):
    """A follower, with the store as it sees it."""

    storage: Unquiet
    follower: Follower


class LogNamesMachine(RuleBasedStateMachine):
    """Everything that may happen to the names of a log."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(mkdtemp())
        self.objects = Objects()
        # Creates that are on their way to the store.
        self.late: list[tuple[str, bytes]] = []
        self.quiet = MemoryStorage(self.objects)
        self.leaders: list[Leading] = []
        self.followers: list[Following] = []
        # By owner, of whom each puts once: key and value. And the owners who were told so.
        self.puts: dict[str, tuple[int, int]] = {}
        self.acknowledged: set[str] = set()
        self.views = 0
        # A view that is closed, of which others are copies, and where it is; cleaned up to there.
        self.base: Path | None = None
        self.base_at = 0
        self.chance: random.Random | None = None
        self.acting = False
        self.acts = 0

    def teardown(self) -> None:
        for leading in self.leaders:
            leading.bucket.close()
        for following in self.followers:
            following.follower.close()
        shutil.rmtree(self.directory)

    # --- What is right --------------------------------------------------------------------------

    def truth(self) -> list[Segment]:
        """Return the log: at each offset what was created there first."""
        found: list[Segment] = []
        end = 0
        while (data := self.objects.ever.get(segment_name(end))) is not None:
            found.append(decode_segment(segment_name(end), data))
            end = found[-1].header.end_offset
        return found

    def rows_at(self, offset: int) -> dict[int, int]:
        rows: dict[int, int] = {}
        for header in (one.header for one in self.truth()):
            if header.owner and header.base_offset < offset:
                key, value = self.puts[header.owner]
                rows[key] = rows.get(key, 0) + value
        return rows

    def check_bucket(self, bucket: Bucket) -> None:
        shown = {key: values[0] for key, values in rows_of(bucket).items()}
        assert shown == self.rows_at(bucket.end_offset)

    # --- Others -----------------------------------------------------------------------------------

    @contextmanager
    def unquiet(self, seed: int) -> Iterator[random.Random]:
        """Let others act before each request within the block."""
        self.chance, self.acts = random.Random(seed), ACTS
        try:
            yield random.Random(seed + 1)
        finally:
            self.chance = None

    def act(self) -> None:
        chance = self.chance
        if chance is None or self.acting or not self.acts or chance.random() > 0.15:
            return
        self.acting = True
        self.acts -= 1
        try:
            what = chance.choice(("take over", "roll up", "clean", "stray", "stray", "late"))
            if what == "stray":
                leave_stray(self.quiet, chance)
            elif what == "late":
                self.deliver()
            else:
                self.usurp(what, chance)
        finally:
            self.acting = False

    def usurp(self, what: str, chance: random.Random) -> None:
        """Another process takes the lead, for a moment."""
        log = Log(self.quiet)
        log.lead()
        if what == "roll up":
            roll_up(log, self.quiet, segments=2)
        elif what == "clean":
            log.clean(min(self.base_at, chance.randint(0, log.end)))
        for _ in range(chance.randint(0, 2)):
            leave_stray(self.quiet, chance)

    @rule()
    def deliver(self) -> None:
        """What was on its way to the store arrives."""
        while self.late:
            name, data = self.late.pop()
            with suppress(AlreadyExists):
                self.quiet.create(name, data)

    @initialize()
    def a_log_with_a_leader_and_a_follower(self) -> None:
        for leads in (True, True, False):
            one = self.new_follower()
            if leads:
                self.leaders.append(Leading(one.storage, Bucket.led_from(one.follower)))
                self.put(0, 3)
            else:
                self.followers.append(one)

    # --- Processes --------------------------------------------------------------------------------

    def new_view(self) -> Path:
        self.views += 1
        path = self.directory / f"view-{self.views}"
        if self.base is not None:
            shutil.copytree(self.base, path)
        return path

    def new_follower(self) -> Following:
        storage = Unquiet(self.objects, self.act, self.late)
        follower = Follower(storage, self.new_view(), HISTORY, identity="b", options=OPTIONS)
        return Following(storage, follower)

    @precondition(lambda self: len(self.leaders) + len(self.followers) < 5)
    @rule(seed=seeds)
    def a_process_follows(self, seed: int) -> None:
        with self.unquiet(seed), suppress(LogGap, OffsetOutOfRange):
            self.followers.append(self.new_follower())

    @rule(seed=seeds)
    def follow(self, seed: int) -> None:
        for one in list(self.followers):
            with self.unquiet(seed):
                try:
                    one.follower.follow()
                except (LogGap, OffsetOutOfRange):  # Cleaned: the view is of no more use.
                    one.follower.close()
                    self.followers.remove(one)

    @precondition(lambda self: self.followers)
    @rule(seed=seeds)
    def a_follower_leads(self, seed: int) -> None:
        with self.unquiet(seed) as chance:
            one = self.followers.pop(chance.randrange(len(self.followers)))
            one.storage.unknown = chance.choice([[], [], [True], [False], [None]])
            with suppress(LogGap, OffsetOutOfRange):
                self.leaders.append(Leading(one.storage, Bucket.led_from(one.follower)))
            one.storage.unknown = []

    @precondition(lambda self: self.followers)
    @rule(seed=seeds)
    def a_follower_leaves_its_view_to_others(self, seed: int) -> None:
        with self.unquiet(seed) as chance:
            one = self.followers.pop(chance.randrange(len(self.followers)))
            applied, path = one.follower.applied, one.follower._inner.view.path
            one.follower.close()
        if applied >= self.base_at:
            self.base, self.base_at = path, applied

    @rule()
    def look_at_all_that_a_view_has(self) -> None:
        """By leading from a copy of what others lead from, in peace, and from nothing."""
        paths = [self.new_view()]
        if LogNames.of(self.quiet.names()).start == 0:
            paths.append(self.directory / f"empty-{self.views}")
        for path in paths:
            bucket = Bucket(self.quiet, path, HISTORY, identity="b", options=OPTIONS)
            self.check_bucket(bucket)
            bucket.close()

    # --- Leaders ----------------------------------------------------------------------------------

    @contextmanager
    def leader(self, seed: int) -> Iterator[tuple[Leading, random.Random]]:
        """One that leads, or believes so; it is gone once it knows better."""
        with self.unquiet(seed) as chance:
            one = chance.choice(self.leaders)
            bucket = one.bucket
            try:
                yield one, chance
            except UnknownOutcome:
                pass
            except (Deposed, LogGap, OffsetOutOfRange) as exc:
                if not isinstance(exc, Deposed) and self.leads(bucket):
                    raise
                bucket.close()
                self.leaders.remove(one)

    def leads(self, bucket: Bucket) -> bool:
        leaders = [one for one in self.truth() if one.header.kind is SegmentKind.LEADER]
        return leaders[-1].header.base_offset == bucket.term

    leading = precondition(lambda self: self.leaders)

    @leading
    @rule(seed=seeds, times=st.integers(1, 4))
    def put(self, seed: int, times: int) -> None:
        for number in range(times):
            if not self.leaders:
                return
            with self.leader(seed + number) as (one, chance):
                owner = f"put-{len(self.puts)}"
                self.puts[owner] = chance.choice(KEYS), chance.randint(1, 9)
                key, value = self.puts[owner]
                add(one.bucket, [key], [value], owner=owner)
                self.acknowledged.add(owner)

    @leading
    @rule(seed=seeds)
    def put_without_an_answer(self, seed: int) -> None:
        with self.leader(seed) as (one, chance):
            owner = f"put-{len(self.puts)}"
            self.puts[owner] = chance.choice(KEYS), chance.randint(1, 9)
            key, value = self.puts[owner]
            answers = [True, True, False, None]
            one.storage.unknown = [chance.choice(answers), chance.choice(answers)]
            try:
                add(one.bucket, [key], [value], owner=owner)
            finally:
                one.storage.unknown = []

    @leading
    @rule(seed=seeds)
    def tidy(self, seed: int) -> None:
        with self.leader(seed) as ((_, bucket), chance):
            while bucket.roll_up(bucket.end_offset):
                pass
            if chance.random() < 0.3:
                bucket.clean(min(self.base_at, chance.randint(0, bucket.end_offset)))

    @leading
    @rule(seed=seeds)
    def read_by_a_leader(self, seed: int) -> None:
        """What it shows is the log's, up to where it believes that the log ends."""
        with self.leader(seed) as ((_, bucket), _):
            end = bucket.settled_end()
            truth = self.truth()
            for one in bucket.read_log(bucket.start_offset, end):
                assert one.header in [other.header for other in truth]
            bases = [one.base_offset for one in bucket.headers(bucket.start_offset, end)]
            for one in bucket.read_segments(bases):
                assert one.header in [other.header for other in truth]
            assert end <= truth[-1].header.end_offset
            self.check_bucket(bucket)

    # --- Readers ----------------------------------------------------------------------------------

    @rule(seed=seeds)
    def read(self, seed: int) -> None:
        """A scan of the log by somebody who leads nothing."""
        before = self.truth()
        with self.unquiet(seed), suppress(OffsetOutOfRange):
            log = Log(Unquiet(self.objects, self.act, self.late))
            start, end = log.start, log.end
            if before:
                assert end >= before[-1].header.end_offset, "what was there is seen"
            found = list(log.segments(start, end))
            truth = [one for one in self.truth() if start < one.header.end_offset]
            expected = [one for one in truth if one.header.base_offset < end]
            assert [encode_segment(a) for a in found] == [encode_segment(b) for b in expected]
            headers = list(log.headers(start, end))
            left_out = [one.header for one in expected if one.header not in headers]
            assert headers == [one.header for one in expected if one.header in headers]
            assert all(one.base_offset < log.start for one in left_out), "only what was cleaned"

    @invariant()
    def what_was_acknowledged_is_there(self) -> None:
        owners = [one.header.owner for one in self.truth() if one.header.owner]
        assert len(set(owners)) == len(owners)
        assert self.acknowledged <= set(owners)

    @invariant()
    def views_show_the_log(self) -> None:
        for _, follower in self.followers:
            rows = follower._inner.view.pin()
            parts = finished_rows(rows, HISTORY, HISTORY.current.values(["a"]))
            shown = {row["k"]: row["a"] for _, part in parts for row in part.to_pylist()}
            rows.close()
            assert shown == self.rows_at(follower.applied)


TestLogNamesMachine = LogNamesMachine.TestCase
TestLogNamesMachine.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=30,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)

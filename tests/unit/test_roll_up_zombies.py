"""Names that were freed by rolling up let nobody write where the log does not end.

Whoever believes that the log ends at an offset either collides there with a leader's segment, which
stays for ever, or finds out after its create that the offset was rolled up, or cleaned, before.
"""

import copy
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from foundation.errors import Deposed, StorageUnavailable, UnknownOutcome
from merge_engine.bucket.log import Log
from merge_engine.bucket.log_names import LogNames, RolledRanges
from merge_engine.bucket.segment import (
    Segment,
    SegmentHeader,
    SegmentKind,
    encode_segment,
    segment_name,
)
from tests.support.faulty_storage import (
    FaultyStorage,
    done_but_unknown,
    not_done_and_unknown,
    still_on_its_way,
    unreachable,
)
from tests.support.logs import write_of
from tests.support.rolling import all_bytes, append_some, roll_up, seen

Tidy = Callable[[Log, FaultyStorage], None]


def nothing(log: Log, storage: FaultyStorage) -> None:
    """Leave the log as it is."""


def rolled(log: Log, storage: FaultyStorage) -> None:
    """Roll it up."""
    roll_up(log, storage)


def cleaned(log: Log, storage: FaultyStorage) -> None:
    """Clean half of it."""
    log.clean(log.end // 2)


def rolled_and_cleaned(log: Log, storage: FaultyStorage) -> None:
    """Roll it up, and clean within what was rolled up."""
    roll_up(log, storage)
    log.clean(log.end // 2)


every_way = pytest.mark.parametrize("tidy", [nothing, rolled, cleaned, rolled_and_cleaned])


class Scene:
    """A log that several have led. At each of its offsets somebody looked, and was paused then."""

    def __init__(self, directory: Path) -> None:
        self.storage = FaultyStorage(directory)
        self.candidates: list[Log] = []
        self.leaders: list[Log] = []
        for number in range(3):
            self.candidates.append(Log(self.storage))
            log = Log(self.storage)
            log.lead()
            for key in range(4):
                self.candidates.append(Log(self.storage))
                append_some(log, 10 * number + key, 1)
            self.leaders.append(log)
        self.log = self.leaders[-1]
        self.headers = list(self.log.headers(0))

    def in_doubt(self, header: SegmentHeader) -> Log:
        """Return the leader that has written this, and has never heard of it."""
        [leader] = [one for one in self.leaders if one.term == header.term]
        zombie = copy.copy(leader)
        zombie._bases = [base for base in leader._bases if base < header.base_offset]
        zombie._headers, zombie._rolled, zombie._indexes = {}, RolledRanges(), {}
        zombie.start = 0
        zombie.end, zombie._in_doubt = header.base_offset, header.nonce
        return zombie


def world_of(tmp_path: Path, tidy: Tidy) -> tuple[Scene, Path]:
    scene = Scene(tmp_path / "log")
    tidy(scene.log, scene.storage)
    return scene, tmp_path / "log"


def moved(log: Log, kept: Path, to: Path) -> Log:
    """Return the log over a fresh copy of all objects as they are kept."""
    shutil.rmtree(to, ignore_errors=True)
    zombie = copy.copy(log)
    zombie._storage = FaultyStorage(shutil.copytree(kept, to))
    return zombie


@every_way
def test_who_is_about_to_lead_from_any_offset_leads_from_the_end(
    tmp_path: Path, tidy: Tidy
) -> None:
    scene, kept = world_of(tmp_path, tidy)
    before = all_bytes(scene.log)
    for candidate in scene.candidates:
        zombie = moved(candidate, kept, tmp_path / "copy")
        assert zombie.lead() == scene.log.end, candidate.end
        zombie.append(write_of(7))
        found = all_bytes(Log(zombie._storage))
        assert found[:-2] == before
        assert all_bytes(zombie) == found
        with pytest.raises(Deposed):
            moved_leader(scene, zombie).append(write_of(8))


def moved_leader(scene: Scene, to: Log) -> Log:
    leader = copy.copy(scene.log)
    leader._storage = to._storage
    return leader


@every_way
@pytest.mark.parametrize("answers", [[], [unreachable], [not_done_and_unknown], [done_but_unknown]])
def test_who_does_not_know_of_its_last_write_at_any_offset_is_deposed(
    tmp_path: Path, tidy: Tidy, answers: list[object]
) -> None:
    """Also if the answer to what it occupies the offset with does not come, or comes late."""
    scene, kept = world_of(tmp_path, tidy)
    before = all_bytes(scene.log)
    of_former = [one for one in scene.headers if one.term != scene.log.term]
    for header in of_former:
        if header.kind is SegmentKind.LEADER:
            continue
        zombie = moved(scene.in_doubt(header), kept, tmp_path / "copy")
        zombie._storage.faults = list(answers)  # type: ignore[attr-defined]
        for _ in answers:
            with pytest.raises((UnknownOutcome, StorageUnavailable, Deposed)):
                zombie.append(write_of(7))
        with pytest.raises(Deposed):
            zombie.append(write_of(7))
        with pytest.raises(Deposed):
            zombie.confirm()
        assert all_bytes(moved_leader(scene, zombie)) == all_bytes(Log(zombie._storage)) == before


@every_way
def test_who_was_deposed_and_knows_all_that_it_wrote_collides(tmp_path: Path, tidy: Tidy) -> None:
    scene, _ = world_of(tmp_path, tidy)
    before, names = all_bytes(scene.log), scene.storage.names()
    for leader in scene.leaders[:-1]:
        for call in (leader.confirm, lambda leader=leader: leader.append(write_of(7))):
            leader.deposed = False
            with pytest.raises(Deposed):
                call()
    assert scene.storage.names() == names
    assert all_bytes(scene.log) == all_bytes(Log(scene.storage)) == before


def test_the_names_of_leaders_are_never_free(tmp_path: Path) -> None:
    scene, _ = world_of(tmp_path, nothing)
    leaders = [one.base_offset for one in scene.headers if one.kind is SegmentKind.LEADER]
    for tidy in (rolled, cleaned, rolled_and_cleaned):
        tidy(scene.log, scene.storage)
        assert {*leaders} <= {*LogNames.of(scene.storage.names()).bases}


@pytest.mark.parametrize("tidy", [rolled, cleaned, rolled_and_cleaned])
def test_a_zombie_deletes_what_it_has_created_at_a_freed_name(tmp_path: Path, tidy: Tidy) -> None:
    scene, _ = world_of(tmp_path, tidy)
    names = {*scene.storage.names()}
    before = all_bytes(scene.log)
    for header in scene.headers[1:9]:
        if header.kind is not SegmentKind.LEADER:
            with pytest.raises(Deposed):
                scene.in_doubt(header).append(write_of(7))
            assert {*scene.storage.names()} == names
    assert all_bytes(scene.log) == all_bytes(Log(scene.storage)) == before


def test_a_candidate_deletes_what_it_has_created_where_the_log_is_rolled_up(tmp_path: Path) -> None:
    scene, kept = world_of(tmp_path, rolled)
    names = {*scene.storage.names()}
    for candidate in scene.candidates:
        zombie = moved(candidate, kept, tmp_path / "copy")
        term = zombie.lead()
        assert {*zombie._storage.names()} == {*names, segment_name(term)}


def test_a_leader_whose_own_term_was_rolled_up_meanwhile_does_not_free_its_name(
    tmp_path: Path,
) -> None:
    """It is paused between its create and its look. Whoever led before it would come to the name,
    if it were free, and be told that it has written."""
    storage = FaultyStorage(tmp_path)
    former = Log(storage)
    former.lead()
    append_some(former, 0, 3)

    class Paused(FaultyStorage):
        def create(self, name: str, data: bytes) -> None:
            super().create(name, data)
            if not heirs:
                heirs.append(Log(storage))
                heirs[0].lead()
                append_some(heirs[0], 10, 5)
                roll_up(heirs[0], storage)

    heirs: list[Log] = []
    paused = Log(Paused(tmp_path))
    end = paused.end
    assert paused.lead() == heirs[0].end
    assert LogNames.of(storage.names()).to_ranges().at(end) is not None
    with pytest.raises(Deposed):
        former.append(write_of(7))


def test_what_arrives_late_in_a_rolled_range_is_deleted_the_next_time(tmp_path: Path) -> None:
    scene, _ = world_of(tmp_path, nothing)
    doubtful = [one for one in scene.headers[1:9] if one.kind is not SegmentKind.LEADER]
    for header in doubtful:
        zombie = scene.in_doubt(header)
        scene.storage.faults = [still_on_its_way]
        with pytest.raises(UnknownOutcome):
            zombie.append(write_of(7))
    roll_up(scene.log, scene.storage)
    names = {*scene.storage.names()}
    before = all_bytes(scene.log)
    scene.storage.deliver_late()
    assert {*scene.storage.names()} == {
        *names,
        *(segment_name(one.base_offset) for one in doubtful),
    }
    assert all_bytes(scene.log) == all_bytes(Log(scene.storage)) == before
    roll_up(scene.log, scene.storage)
    assert {*scene.storage.names()} == names


@pytest.mark.parametrize("kind", [SegmentKind.EMPTY, SegmentKind.LEADER, SegmentKind.WRITE])
def test_who_looked_before_the_log_was_rolled_up_reads_no_stray(
    tmp_path: Path, kind: SegmentKind
) -> None:
    """Whatever came to the names that were freed, and whichever way the log is read."""
    scene, _ = world_of(tmp_path, nothing)
    expected = seen(scene.log)
    readers = [Log(scene.storage) for _ in expected]
    roll_up(scene.log, scene.storage)
    names = scene.storage.names()
    for one in scene.headers:
        name = segment_name(one.base_offset)
        if name not in names and scene.log._rolled.at(one.base_offset):
            stray = write_of(7, 8, 9)
            header = replace(
                stray.header, kind=kind, base_offset=one.base_offset, term=9_999, nonce="stray"
            )
            if kind is SegmentKind.WRITE:
                stray = replace(stray, header=header)
            else:
                stray = Segment(replace(header, rows=0, column_ids=()), {}, {})
            scene.storage.create(name, encode_segment(stray))
    for reader, way in zip(readers, expected, strict=True):
        assert seen(reader)[way] == expected[way]
    assert seen(Log(scene.storage)) == expected
    # A leader asks whether it led when the log ended somewhere, and finds a stray there.
    for one in scene.headers:
        if one.term == scene.log.term:
            scene.log.confirm_at(one.base_offset)


def test_a_damaged_stray_is_no_damage(tmp_path: Path) -> None:
    scene, _ = world_of(tmp_path, nothing)
    before = all_bytes(scene.log)
    reader, follower = Log(scene.storage), scene.candidates[1]
    roll_up(scene.log, scene.storage)
    scene.storage.create(segment_name(follower.end), b"not a segment")
    assert all_bytes(reader) == before
    assert list(follower.newer()) == []
    assert follower.has_gone_on()
    assert follower.end == scene.log.end


def test_while_the_leader_rolls_up_a_candidate_that_looked_before_leads_after_all(
    tmp_path: Path,
) -> None:
    """The end that it saw is rolled up between its look and its create."""
    scene, _ = world_of(tmp_path, nothing)
    candidate = Log(scene.storage)
    append_some(scene.log, 50, 9)
    roll_up(scene.log, scene.storage)
    end = scene.log.end
    assert LogNames.of(scene.storage.names()).to_ranges().at(candidate.end) is not None
    assert candidate.lead() == end
    with pytest.raises(Deposed):
        scene.log.append(write_of(1))

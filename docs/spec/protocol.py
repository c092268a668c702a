#!/usr/bin/env python3
"""Executable specification of the writer protocol: locks, debts, fences, undo, redo, seal, commit, and committed reads.

A random scheduler interleaves incarnations of several owners over a few buckets, in bursts of steps: crashes, zombies that
go on, expiries, takeovers, releases, retried puts, fences, payments and tasks that arrive late, creates that time out and happen
after all, replays with other contents, deletes, jobs that come back with other columns, owners that are forgotten, bucket leaders
that move, and deposed leaders that still answer. One owner's batches are those of streaming queries, which are planned, noted in a
checkpoint and replayed; checkpoints are set back, and queries hand over to others and come back. Readers take committed scans on
the way. In the end everything is taken over, all that is still under way wakes up once more, and then

  1. each column of each key holds exactly what the committed batches made of it, in order;
  2. a row exists iff a committed write left a column of it touched (no ghost rows);
  3. at no moment did two live locks pin the same column, and no batch of an owner was committed twice;
  4. every scan, continued with the committed changelog from its offset on, arrives at the final table;
  5. every cut of the whole table shows each owner's batches whole, up to one of them, in all buckets alike; continued with the
     committed changelog from that cut on, it arrives at the final table; and with the changes between two cuts, at the later one;
  6. no event of a query's source was counted twice, and each that its checkpoint says is done was counted, in all columns of its
     writer.

usage: protocol.py [runs] [first seed] [--break RULE]     RULE: one of RULES; each one, switched off, must be caught
"""

import argparse
import random
from collections import defaultdict

BUCKETS, KEYS, COLUMNS = 2, 2, ("x", "y", "z")
RULES = {
    "fence": "a leader refuses epochs older than the newest it was fenced with",
    "current": "a fence is granted only to the epoch that ZooKeeper holds now",
    "leaders": "ready and commit check, in their transaction, that the leaders that answered still lead",
    "term": "a call carries the term of the leader that was fenced; any other leader refuses it",
    "closed": "recovery ends with the reading of the log ends: a payment that arrives later is refused",
    "doubt": "after a create of unknown outcome the leader occupies its offset before it answers anything else",
    "dedupe": "a bucket applies a token once",
    "token": "the token has the epoch in it: after an undo the batch is written again",
    "seal": "no put of a batch after its seal",
    "undo": "every key and column of the tail is restored",
    "touched": "undo restores 'never written', not zero",
    "debt": "an expired owner's tail goes to whoever takes its columns",
    "pin": "a debt's columns are pinned until it is paid",
    "self": "an owner waits while another still has a debt of its to pay",
    "redo": "a prepared batch is rolled forward",
    "decided": "a prepared batch counts as committed when its owner is succeeded",
    "commit": "commit is conditional on the epoch",
    "release": "only a writer with nothing uncommitted releases; any other exit leaves the lock to expire",
    "stable": "a committed scan stands at the last stable offset",
    "cut": "a cut leaves out, in every bucket, what each owner wrote after the record that the cut has of it",
    "counter": "the records of a cut are read between two readings of one epoch counter: nobody acquired meanwhile",
    "newer": "a cut leaves out what was written under epochs that it does not know, or that were not ready",
    "plan": "a batch of the last committed number that was planned at another time is refused, not skipped",
    "columns": "a batch is skipped as committed only by a writer whose columns it all had",
    "former": "a query that an owner was handed over from is refused, whatever it says",
}
DELETE = object()


class Fenced(Exception):
    """A newer epoch, another leader, or a sealed batch: this incarnation must stop."""


class Refused(Exception):
    """A live lock of another owner is in the way."""


class ZooKeeper:
    """The lock records and one epoch counter for the table. Each method is one conditional transaction.

    A record: held, expired, epoch, columns, ready, batch (last committed), offsets (at that commit), debts, prepared; when that batch
    was planned, and its columns (written); the query that counts, from which batch on (start), and those that did before (former).
    A debt: (kind, owner, columns, offsets, token, contents per bucket); kind is "undo" or "redo".
    """

    def __init__(self):
        self.records, self.epoch = {}, 0

    @staticmethod
    def pinned(rec):
        """What a lock keeps others from: its columns and, until they are paid, its debts' columns."""
        return set(rec["columns"]).union(*(set(debt[2]) for debt in rec["debts"] if on("pin")))

    @classmethod
    def in_the_way(cls, rec, owner, columns):
        """A lock on one of the columns, or one that has yet to pay a debt of this very owner."""
        return cls.pinned(rec) & set(columns) or on("self") and any(debt[1] == owner for debt in rec["debts"])

    @staticmethod
    def unpaid(owner, rec):
        """A held lock has debts to pay or, once it is ready, a tail of its own; never both: it writes only when ready."""
        if not rec["held"]:
            return []
        if not rec["ready"]:
            return list(rec["debts"])
        if rec["prepared"]:  # decided: it counts as committed from here on, and remains to be applied
            token, contents, plan = rec["prepared"]
            if on("decided"):
                rec.update(batch=token[1], plan=plan, written=rec["columns"])
            return [("redo", owner, rec["columns"], dict(rec["offsets"]), token, contents)]
        return [("undo", owner, rec["columns"], dict(rec["offsets"]), None, None)]

    @classmethod
    def hand_over(cls, owner, rec, query, meant):
        """Another query than before counts from here on (None: a writer that is no query), if it may."""
        decided = dict(rec)
        cls.unpaid(owner, decided)
        if query in rec["former"] and on("former") or query is not rec["query"] and decided["batch"] >= 0 and not meant:
            raise Refused
        if query is not rec["query"]:
            if rec["query"] and decided["batch"] >= rec["start"]:
                rec["former"] = rec["former"] | {rec["query"]}
            rec.update(query=query, start=decided["batch"] + 1)

    def acquire(self, owner, columns, query=None, handover=True):
        rivals = [(o, r) for o, r in self.records.items() if o != owner and r["held"] and self.in_the_way(r, owner, columns)]
        if any(not rec["expired"] for _, rec in rivals):
            raise Refused
        new = dict(batch=-1, debts=[], held=False, ready=False, prepared=None, plan=None, written=(), query=None, start=0, former=set())
        rec = self.records.setdefault(owner, new)
        self.hand_over(owner, rec, query, handover)
        self.epoch += 1
        debts = self.unpaid(owner, rec)  # of our former self
        for rival, other in rivals:  # expired: take them over, with all that they had not committed
            debts += self.unpaid(rival, other) if on("debt") else []
            other.update(held=False, ready=False, debts=[], prepared=None)
        rec.update(held=True, expired=False, epoch=self.epoch, columns=columns, ready=False, debts=debts, prepared=None)
        live = [c for r in self.records.values() if r["held"] and not r["expired"] for c in self.pinned(r)]
        assert len(live) == len(set(live)) or BREAK, "two live locks pin the same column"
        return self.epoch

    def check(self, owner, epoch, leaders_stand=True):
        rec = self.records.get(owner)
        if rec is None or not rec["held"] or rec["epoch"] != epoch or not leaders_stand and on("leaders"):
            raise Fenced
        return rec

    def ready(self, owner, epoch, ends, leaders_stand):
        """Debts are paid; ends, read after the fences, is the baseline that a crash before the first commit is undone to."""
        self.check(owner, epoch, leaders_stand).update(ready=True, offsets=dict(ends), debts=[], expired=False)

    def prepare(self, owner, epoch, batch, contents, plan):
        """Redo only: the folded batch is durable and fits; from here on it will be applied, whoever has to do it."""
        self.check(owner, epoch).update(prepared=((epoch, batch), contents, plan), expired=False)

    def commit(self, owner, epoch, batch, ends, leaders_stand, plan, columns):
        rec = self.check(owner, epoch, leaders_stand) if on("commit") else self.records.get(owner) or {"batch": -1}
        rec.update(batch=batch, offsets=dict(ends), prepared=None, expired=False, plan=plan, written=columns)

    def release(self, owner, epoch):
        """Of a writer with nothing uncommitted; the batch number stays."""
        self.check(owner, epoch).update(held=False, ready=False, debts=[], prepared=None)

    def abandon(self, owner, epoch):
        """Any other orderly exit: give the lock up for takeover, tail and debts and all."""
        self.check(owner, epoch).update(expired=True)

    def forget(self, owner):
        if owner in self.records and not self.records[owner]["held"]:
            del self.records[owner]


class Query:
    """A streaming query: its source, whose events are numbered, and its checkpoint.

    A batch is planned once, which is noted before it runs: (from this event on, up to that one); and noted again when it is done. A
    checkpoint that is set back forgets its last plan: then another batch is planned under that number.
    """

    def __init__(self):
        self.events, self.plans, self.done = 0, [], 0

    def next(self):
        """The number of the next batch, and its plan: the one that is noted, or a new one. More events have come since the last."""
        if self.done == len(self.plans):
            begin = self.plans[-1][1] if self.plans else 0
            self.events += 1
            self.plans.append((begin, self.events))
        return self.done, self.plans[self.done]

    def note(self, number, plan):
        if self.plans[number : number + 1] == [plan]:
            self.done = max(self.done, number + 1)

    def set_back(self):
        del self.plans[-1:]
        self.done = min(self.done, len(self.plans))


class Bucket:
    """A log, its materialised view, and its leader. Calls are served one at a time, from check to apply.

    A log entry: (kind, owner, token, {key: {column: (before, after)}}, start); None = never written (or deleted).
    """

    def __init__(self, zk, number):
        self.zk, self.number = zk, number
        self.log, self.rows, self.applied = [], defaultdict(dict), {}  # durable: the log and what it implies
        self.term, self.holders, self.epochs, self.closed, self.sealed = 0, {}, {}, {}, {}  # the leader's memory
        self.zombie = None  # (term, log end) of a deposed leader that does not know it yet: the worst case, it answers

    def failover(self, zombie):
        """A new leader has a new term and knows no writer: one that was under way starts over, under a new epoch."""
        self.zombie = (self.term, len(self.log)) if zombie else None
        self.term, self.holders, self.epochs, self.closed, self.sealed = self.term + 1, {}, {}, {}, {}

    def fence(self, owner, columns, epoch, via_zombie):
        """From here on older epochs of these columns, and of this owner, are refused. Returns the term."""
        if via_zombie and self.zombie:
            return self.zombie[0]
        if on("current"):
            self.zk.check(owner, epoch)
        if epoch < self.holders.get(owner, 0) and on("fence"):
            raise Fenced
        self.holders[owner] = epoch
        for c in columns:
            self.epochs[c] = max(self.epochs.get(c, 0), epoch)
        return self.term

    def _answers(self, writer, columns, epoch, term):
        """True: go on. False: a deposed leader answers, into a log that nobody reads."""
        if self.zombie and term == self.zombie[0]:
            return False
        if on("term") and term != self.term:
            raise Fenced
        if on("fence") and (self.holders.get(writer) != epoch or any(epoch < self.epochs.get(c, 0) for c in columns)):
            raise Fenced
        return True

    def _write(self, kind, owner, token, new, start=None):
        changes = {}
        for key, columns in new.items():
            row = self.rows[key]
            diff = {c: (row.get(c), v) for c, v in columns.items() if row.get(c) != v}
            for c, (_, after) in diff.items():
                if after is None:
                    del row[c]
                else:
                    row[c] = after
            if diff:
                changes[key] = diff
            if not row:
                del self.rows[key]
        if changes:
            self.log.append((kind, owner, token, changes, start))

    def occupy(self):
        """An empty segment at the end of the log: whatever was to be created there can no longer be."""
        self.log.append(("empty", None, None, {}, None))

    def put(self, writer, epoch, term, owner, columns, token, content, late_create=None):
        """Fold content, {key: {column: amount or DELETE}}, for owner; writer is owner, or pays its debt.

        The token is (epoch, batch) of the incarnation that first wrote or prepared the batch. Repeated, it changes nothing:
        the first attempt's content stands. late_create: the object store does not answer; it may create the segment later.
        """
        if not self._answers(writer, columns, epoch, term):
            return
        if on("dedupe") and self.applied.get(owner, (None,))[0] == token:
            return
        sealed = self.sealed.get(owner, (None, None))
        if token[0] == sealed[0] and token[1] <= sealed[1]:
            raise Fenced
        if on("closed") and on("token") and token[0] != epoch and self.closed.get(writer) == epoch:
            raise Fenced
        if late_create:
            late_create(len(self.log))
            if on("doubt"):
                self.occupy()
            raise Fenced
        old = {k: self.rows.get(k, {}) for k in content}
        new = {k: {c: None if v is DELETE else (old[k].get(c) or 0) + v for c, v in cs.items()} for k, cs in content.items()}
        self._write("write", owner, token, new)
        self.applied[owner] = (token, content)

    def seal(self, writer, epoch, term, columns, token):
        """Close a batch: a task that nobody waits for can no longer write it. Returns the log end and what was applied."""
        if not self._answers(writer, columns, epoch, term):
            return self.zombie[1], {}
        if on("seal"):
            self.sealed[writer] = token
        applied = self.applied.get(writer, (None, None))
        return len(self.log), applied[1] if applied[0] == token else {}

    def end(self, writer, epoch, term, columns):
        """The log end, and the end of this epoch's recovery: debts can no longer be paid under it."""
        if not self._answers(writer, columns, epoch, term):
            return self.zombie[1]
        self.closed[writer] = epoch
        return len(self.log)

    def undo(self, writer, epoch, term, debtor, columns, start):
        """Write back the first before-image, per key and column, of the debtor's changes since start."""
        if not self._answers(writer, columns, epoch, term):
            return
        if on("closed") and self.closed.get(writer) == epoch:
            raise Fenced
        back = {}
        for _, owner, _, changes, _ in self.log[start:]:
            for key, diff in changes.items() if owner == debtor else ():
                for c, (before, _) in diff.items():
                    if c in columns:
                        back.setdefault(key, {}).setdefault(c, 0 if before is None and not on("touched") else before)
        if not on("undo"):
            back = dict(list(back.items())[1:])
        end = len(self.log)
        self._write("undo", debtor, None, back, start)
        if len(self.log) == end and any(entry[:2] == ("write", debtor) for entry in self.log[start:]):
            self.log.append(("undo", debtor, None, {}, start))  # changes that cancelled each other: readers must know

    def stable(self):
        """The last stable offset: before any work that may yet be undone, and not between a write and its undo."""
        i, unresolved = self.number, [len(self.log)]
        for owner, rec in self.zk.records.items():
            for kind, debtor, _, offsets, token, _ in self.zk.unpaid(owner, dict(rec)):
                for n in range(offsets.get(i, 0), len(self.log)):
                    entry = self.log[n]
                    if kind == "undo" and entry[1] == debtor:
                        unresolved.append(n)
        lso = min(unresolved) if on("stable") else len(self.log)
        moved = on("stable")
        while moved:
            moved = False
            for kind, debtor, _, _, start in self.log[lso:]:
                cut = [n for n in range(start or 0, lso) if self.log[n][1] == debtor] if kind == "undo" else []
                if cut:
                    lso, moved = cut[0], True
                    break
        return lso

    def scan(self):
        """A committed scan: its offset, and the table there."""
        lso = self.stable()
        return lso, replay({}, self.log[:lso])

    def after_cut(self, records, epoch):
        """The offsets that a cut leaves out: per owner, all from the first that came after its record. Never a gap per column."""
        starts = {}
        for owner, rec in records.items():
            for _, debtor, _, offsets, _, _ in self.zk.unpaid(owner, dict(rec)):
                starts[debtor] = min(offsets.get(self.number, 0), starts.get(debtor, len(self.log)))
        for n, (_, owner, token, _, _) in enumerate(self.log):
            rec = records.get(owner)
            known = epoch if rec is None or not rec["held"] or rec["ready"] else rec["epoch"] - 1
            if token and token[0] > known and on("newer"):
                starts[owner] = min(n, starts.get(owner, n))
        return [n for n, entry in enumerate(self.log) if entry[1] in starts and n >= starts[entry[1]]]

    def cut(self, records, epoch):
        """The table as the records have it, the log end, and the offsets left out. The leader is confirmed."""
        later = self.after_cut(records, epoch) if on("cut") else range(self.stable(), len(self.log))
        table = replay({}, self.log)
        for n in reversed(later):  # before-images, the first one last
            for key, diff in self.log[n][3].items():
                for c, (before, _) in diff.items():
                    table[key, c] = before
        return {at: v for at, v in table.items() if v is not None}, len(self.log), set(later)

    def changelog(self, start):
        """Committed changes from start on: writes that were undone, and their undo, are left out."""
        return [self.log[n] for n in self.committed_offsets() if n >= start]

    def committed_offsets(self):
        undone = set()
        for n, (kind, debtor, _, _, begin) in enumerate(self.log):
            if kind == "undo":
                undone |= {m for m in range(begin, n + 1) if self.log[m][1] == debtor}
        return [n for n in range(len(self.log)) if n not in undone]


def replay(table, entries):
    for _, _, _, changes, _ in entries:
        for key, diff in changes.items():
            for c, (_, after) in diff.items():
                table[key, c] = after
    return {at: v for at, v in table.items() if v is not None}


class World:
    def __init__(self, seed):
        self.rng, self.zk = random.Random(seed), ZooKeeper()
        self.buckets = [Bucket(self.zk, i) for i in range(BUCKETS)]
        self.truth = {}  # (bucket, key, column) -> value made by committed batches
        self.running, self.scans, self.cuts, self.done = [], [], [], set()
        self.queries = defaultdict(list)  # owner -> its queries
        self.counted, self.noted = set(), set()  # (owner, query, event, column): committed; done, as a checkpoint says
        self.unprepared = {}  # (owner, token) of a prepared batch -> what its columns held before it

    def committed(self, owner, batch, contents):
        assert (owner, batch) not in self.done, f"batch {batch} of {owner} was committed twice"
        self.done.add((owner, batch))
        for i, content in contents.items():
            for k, columns in content.items():
                for c, v in columns.items():
                    if v is DELETE:
                        self.truth.pop((i, k, c), None)
                    else:
                        self.truth[i, k, c] = self.truth.get((i, k, c), 0) + v

    def events(self, owner, query, plan, columns):
        """The events of a batch, unless it is that of no query, or of one whose owner was forgotten since."""
        return {(owner, query, event, c) for event in range(*plan) for c in columns} if query in self.queries[owner] else set()

    def count(self, events):
        assert not events & self.counted, "an event was counted twice"
        self.counted |= events

    def content(self, columns):
        """One batch's rows for one bucket; a replay draws anew, as a nondeterministic source would."""
        rng = self.rng
        amount = lambda: DELETE if rng.random() < 0.1 else rng.randint(1, 9)  # noqa: E731
        return {k: {c: amount() for c in columns} for k in range(KEYS) if rng.random() < 0.7}

    def late(self, call, *args):
        """A call that arrives at any later time: a duplicate, or one of a task that nobody waits for any more."""
        def process():
            for _ in range(self.rng.randint(0, 6)):
                yield
            try:
                call(*args)
            except Fenced:
                return
        self.running.append(process())

    def late_create(self, bucket, *entry):
        """Return what put calls instead of creating its segment: the create happens later, if its offset is still free."""
        def register(offset):
            def create():
                if len(bucket.log) == offset:
                    bucket._write(*entry)
            self.late(create)
        return register

    def visible(self, columns=COLUMNS):
        """What a cut must show of these columns: committed batches, without those that are prepared but not known to be applied."""
        truth = {at: v for at, v in self.truth.items() if at[2] in columns}
        for owner, rec in self.zk.records.items():
            for kind, debtor, pinned, _, token, _ in self.zk.unpaid(owner, dict(rec)):
                if kind == "redo":
                    truth = {at: v for at, v in truth.items() if at[2] not in pinned}
                    truth |= {at: v for at, v in self.unprepared[debtor, token].items() if at[2] in columns}
        return truth

    def reader(self):
        """Takes a cut: all records within one epoch, one after the other, and then the buckets, one after the other."""
        known = len(self.cuts)  # those are over: this one is later
        while True:
            epoch, records, expected = self.zk.epoch, {}, self.visible()
            pinned = {owner: self.zk.pinned(rec) for owner, rec in self.zk.records.items() if rec["held"]}
            for owner in list(self.zk.records):
                yield
                if owner in self.zk.records:  # else it has released all, and was forgotten
                    records[owner] = dict(self.zk.records[owner])
                pins = pinned.get(owner, set())
                expected = {at: v for at, v in expected.items() if at[2] not in pins} | self.visible(pins)
            if self.zk.epoch == epoch or not on("counter"):
                break
        seen, positions = {}, []
        for b in self.buckets:
            yield
            table, end, later = b.cut(records, epoch)
            seen |= {(b.number, k, c): v for (k, c), v in table.items()}
            positions.append((b, table, end, later))
        assert seen == expected, f"a cut shows {seen}, its records say {expected}"
        self.cuts.append((known, positions))

    def is_replay(self, rec, batch, plan, columns):
        """Whether this batch is the last committed one, and may be skipped; Fenced if it is another one of its number."""
        if batch < rec["batch"] or batch == rec["batch"] and plan != rec["plan"] and on("plan"):
            raise Fenced
        if batch == rec["batch"] and not set(columns) <= set(rec["written"]) and on("columns"):
            raise Fenced
        return batch == rec["batch"]

    def incarnation(self, owner, columns, batches, mode, query=None, handover=True):
        """A writer process. At each yield it may pause, die, or be overtaken."""
        rng, clean, epoch, plan, number = self.rng, False, None, None, 0
        try:
            epoch = self.zk.acquire(owner, columns, query, handover)
            yield
            debts = list(self.zk.check(owner, epoch)["debts"])
            me = {}  # bucket -> (owner, epoch, term), which goes with every call
            for b in self.buckets:
                pins = set(columns).union(*(set(debt[2]) for debt in debts))
                me[b] = (owner, epoch, b.fence(owner, pins, epoch, via_zombie=rng.random() < 0.3))
                if rng.random() < 0.2:
                    self.late(b.fence, owner, pins, epoch, False)
                yield
            for kind, debtor, debt_columns, offsets, token, contents in debts:
                for i, b in enumerate(self.buckets):
                    if kind == "undo":
                        pay = (b.undo, *me[b], debtor, debt_columns, offsets.get(i, 0))
                    elif i in contents and on("redo"):
                        pay = (b.put, *me[b], debtor, debt_columns, token, contents[i])
                    else:
                        continue
                    if rng.random() < 0.2:
                        self.late(*pay)
                    pay[0](*pay[1:])
                    yield
            ends = {}
            for i, b in enumerate(self.buckets):
                ends[i] = b.end(*me[b], columns)
                yield
            self.zk.ready(owner, epoch, ends, self.lead(me))
            clean = True
            yield
            for _ in range(batches):
                rec = self.zk.check(owner, epoch)
                batch = rec["batch"] + 1
                if query:
                    number, plan = query.next()
                    batch = rec["start"] + number
                    yield
                    if self.is_replay(self.zk.check(owner, epoch), batch, plan, columns):
                        query.note(number, plan)
                        self.noted |= self.events(owner, query, plan, columns)
                        continue
                touched = [b for b in self.buckets if rng.random() < 0.7]
                token, prepared, clean = (epoch if on("token") else 0, batch), {}, False
                if mode == "redo":
                    prepared = {b: self.content(columns) for b in touched}
                    contents = {b.number: content for b, content in prepared.items()}
                    self.unprepared[owner, (epoch, batch)] = {at: v for at, v in self.truth.items() if at[2] in columns}
                    self.zk.prepare(owner, epoch, batch, contents, plan)
                    self.committed(owner, batch, contents)
                    self.count(self.events(owner, query, plan, columns))
                    yield
                elif rng.random() < 0.3:  # an attempt of the stage that had rows for other buckets
                    b = rng.choice(self.buckets)
                    self.late(b.put, *me[b], owner, columns, token, self.content(columns))
                for b in touched:
                    for _attempt in range(rng.choice((1, 1, 2))):  # a retried task
                        content = prepared[b] if mode == "redo" else self.content(columns)
                        if rng.random() < 0.05:
                            new = {k: {c: 1 for c in columns} for k in content}
                            b.put(*me[b], owner, columns, token, content, self.late_create(b, "write", owner, token, new))
                        b.put(*me[b], owner, columns, token, content)
                        yield
                ends, applied = {}, {}
                for i, b in enumerate(self.buckets):
                    ends[i], applied[i] = b.seal(*me[b], columns, token)
                    yield
                self.zk.commit(owner, epoch, batch, ends, self.lead(me), plan, columns)
                if mode == "undo":  # whatever was applied before the seal, by whichever attempt
                    self.committed(owner, batch, applied)
                    self.count(self.events(owner, query, plan, columns))
                clean = True
                yield
                if query:
                    query.note(number, plan)
                    self.noted |= self.events(owner, query, plan, columns)
            if rng.random() < 0.5:
                self.zk.release(owner, epoch)
        except (Fenced, Refused):
            if epoch and rng.random() < 0.5:  # an orderly exit after a failure
                try:
                    (self.zk.release if clean or not on("release") else self.zk.abandon)(owner, epoch)
                except Fenced:
                    pass

    @staticmethod
    def lead(me):
        return all(term == b.term for b, (_, _, term) in me.items())

    def query(self, owner):
        """A query of an owner: a new one, the last one, or one that was before."""
        queries = self.queries[owner]
        if not queries or self.rng.random() < 0.3:
            queries.append(Query())
        return self.rng.choice((queries[-1], queries[-1], self.rng.choice(queries)))

    def run(self):
        rng = self.rng
        wants = {"a": ["x"], "b": ["yz", "y", "z"], "c": ["xy", "x"], "d": ["x", "xz"]}
        for _ in range(rng.randint(15, 60)):
            action = rng.random()
            if action < 0.20 or not self.running:
                owner = rng.choice(list(wants))
                columns = tuple(rng.choice(wants[owner]))
                writer = owner, columns, rng.randint(1, 3), rng.choice(("undo", "redo"))
                query = self.query(owner) if owner == "d" and rng.random() < 0.9 else None
                self.running.append(self.incarnation(*writer, query, rng.random() < 0.8))
            elif action < 0.21 and self.queries["d"]:
                rng.choice(self.queries["d"]).set_back()
            elif action < 0.27:
                self.running.pop(rng.randrange(len(self.running)))  # crash
            elif action < 0.34:
                rng.choice(self.buckets).failover(zombie=rng.random() < 0.5)
            elif action < 0.42 and self.zk.records:
                rng.choice(list(self.zk.records.values()))["expired"] = True
            elif action < 0.44:
                owner = rng.choice(list(wants))
                self.zk.forget(owner)
                if owner not in self.zk.records:  # as if it had never been: whatever comes again counts again
                    self.queries.pop(owner, None)
                    for known in (self.done, self.counted, self.noted):
                        known -= {at for at in known if at[0] == owner}
            elif action < 0.48:
                b = rng.choice(self.buckets)
                self.scans.append((b, *b.scan()))
            elif action < 0.54:
                self.running.append(self.reader())
            else:
                process = rng.choice(self.running)
                for _ in range(rng.choice((1, 1, 2, 3, 8, 20))):
                    if next(process, StopIteration) is StopIteration:
                        self.running.remove(process)
                        break
        for b in self.buckets:
            b.zombie = None
        for _ in range(2):  # everything is taken over; all that is still under way wakes up; once more
            for rec in self.zk.records.values():
                rec["expired"] = True
            self.running.insert(0, self.incarnation("last", COLUMNS, 0, "undo"))
            while self.running:
                for _ in self.running.pop(0):
                    pass
        self.check()

    def check(self):
        for i, b in enumerate(self.buckets):
            final = replay({}, b.log)
            assert final == {(k, c): v for k, row in b.rows.items() for c, v in row.items()}, "the view is not the log"
            want = {(k, c): v for (j, k, c), v in self.truth.items() if j == i}
            assert final == want, f"bucket {i}: table {final}, committed {want}"
        lost = {(event, c) for _, _, event, c in self.noted - self.counted}
        assert not lost, f"a checkpoint says that events are done which were not counted: {lost}"
        for b, offset, table in self.scans:
            assert replay(table, b.changelog(offset)) == replay({}, b.log), f"scan at {offset} + changelog is not the table"
        for known, positions in self.cuts:
            for i, (b, table, end, later) in enumerate(positions):
                rest = [b.log[n] for n in b.committed_offsets() if n >= end or n in later]
                assert replay(dict(table), rest) == replay({}, b.log), "a cut + the changelog from there on is not the table"
                for _, before in self.cuts[:known]:
                    _, old, old_end, left_out = before[i]
                    new = [n for n in b.committed_offsets() if (n >= old_end or n in left_out) and n < end and n not in later]
                    assert replay(dict(old), [b.log[n] for n in new]) == table, "a cut + what came between is not the next cut"


def on(rule):
    return rule != BREAK


def main():
    global BREAK
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", type=int, nargs="?", default=20_000)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    parser.add_argument("--break", dest="rule", default="", choices=("", *RULES))
    parser.add_argument("--rules", action="store_true", help="list the rules and end")
    args = parser.parse_args()
    if args.rules:
        print("\n".join(RULES))
        return
    BREAK = args.rule
    for seed in range(args.seed, args.seed + args.runs):
        try:
            World(seed).run()
        except AssertionError as error:
            print(f"seed {seed}: {error}")
            raise SystemExit(1) from None
    print(f"{args.runs} histories: every invariant holds")


BREAK = ""
if __name__ == "__main__":
    main()

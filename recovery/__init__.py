"""Exactly once: the writer, the leader's side of its protocol, and committed reads.

embedded/    the writer over buckets of this process
leader/      what the leader of a bucket does for writers, and for its snapshots
reader/      committed reads of a bucket
writer/      the exactly-once writer: acquire, fence, recover, ready, (put, seal, commit)*, release
description  what a table is, as a small value
table        what every table can do, in one process or on servers
"""

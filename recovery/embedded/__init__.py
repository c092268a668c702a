"""The writer over buckets of this process.

access       the writer's boundary over buckets of this process: see `recovery.writer.access`
local_locks  the locks of an embedded table, kept beside it
part_puts    a put of any size to buckets of this process: part after part, as they are cut
place        an embedded table, as its writers reach it
reads        reading an embedded table: rows and changes of its buckets, committed or latest
table        the embedded table: all partitions and buckets of a table in one process
"""

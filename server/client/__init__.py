"""The client of a cluster: tables, look-ups, scans, puts, over Arrow Flight.

asked_keys        the keys of look-ups: checked for each, and made into arrays for many at a time
asking            questions to the coordinator, over whichever session the client has by now
bucket_rows       the rows of one bucket, as a client reads them from the bucket's leader
changelog         a bucket's changelog, as a client reads it
cluster           the client of a cluster: finds its tables and servers through ZooKeeper
connections       connections to tablet servers, one per address, reused by all threads
leader_calls      calls to many buckets at once: one per server, repeated where leaders moved
leader_directory  which server leads which bucket: a guess, and ZooKeeper where it was wrong
lookup_lanes      look-ups of few keys, of all threads of a client, go together
lookups           look-ups: each server is asked for the keys of its buckets
outgoing          batches on their way to a server: plain Arrow, in messages of a handy size
puts              puts of rows that fit into one call per server
remote_table      a table of a cluster, with the calls of the embedded one
scan_sources      the sources of a table's scan, each bucket by bucket
snapshot_lease    a lease on a table's snapshots, as a client holds it
snapshot_rows     the rows of one bucket from a KV snapshot, read from the object store
snapshots         snapshots on demand: a call goes on for about a second, and is made again
steps             calls that go on for about a second, and are made again for what is left
table_caller      sends calls to the buckets of a table
undoing           undos: a call goes on for about a second, and is made again for what is left
uploads           large puts: parts go to their leaders in chunks, and are then advanced
writer_access     the writer's boundary over Flight: see `recovery.writer.access`
"""

"""A bucket: its log, its view, and the calls that keep the two together.

bucket             a bucket: a log, its view, and the calls that keep the two together
changelog          the changelog as readers see it: finished values, a record per changed key
database           a directory of RocksDB, open: the one way to it
fair_lock          a lock that is given to those who wait for it in the order in which they came
follower           a bucket that somebody else leads, followed: warm for whoever leads it next
log                the log of a bucket: immutable segments, and the leader that appends
log_and_view       what is merged is logged, and what is logged is applied to the view
log_names          what the names in a log's storage say: its start, and the form of its parts
log_reader         reading a log: its segments in their order, whichever objects they are in
log_start          the mark of where a cleaned log starts, and what it says of what is gone
masked_rows        the table at an earlier offset, from rows that are pinned at a later one
masks              old states by key, in place of those stored, for a reader that looks back
object_frame       the frame of small objects beside the segments: version and checksum
options            how a bucket uses memory and disk
overlay            rows that are tried and not written
owner_work         what is known of an owner's changes in a bucket without its log
pinned_rows        all rows of a view as they were at one moment, for a reader that takes its time
put_to_all         one put to several buckets: all of them try the merge before the first one writes
results            what puts and undos did: in one bucket, and in a table
rocksdb_errors     what rocksdict raises, as our errors
roll_up            old neighbours among the segments of a log become one larger object
rolled             a rolled object: neighbouring segments in one, each byte for byte
segment            a segment: one atomic commit of a bucket, as bytes
row_writer         writes rows of a view to RocksDB, with all that goes with them, in one step
snapshot_manifest  what a snapshot is of, and the objects that its files are in
snapshot_storage   snapshots of a bucket in its object storage: upload, restore, sweep
tokens             who writes: owners and their tokens, judged before anything is written under them
undo               of a debtor's changes in a range of the log, the first before-images
undo_steps         undo of a bucket's changes, in steps between which others write
undone_work        which changes of a log were undone: as a debt, so that no cut has ever had them
view               the materialised view of a bucket
view_meta          what a view keeps besides its rows
write_behind       when, and by whom, rows that have changed are written to RocksDB
"""

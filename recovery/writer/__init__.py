"""The exactly-once writer: acquire, fence, recover, ready, (put, seal, commit)*, release.

access           the boundary between the writer and the buckets
batch_work       a batch as its writer runs it
debts            paying debts: what a former self, or an expired owner, had not committed
parts            large batches, cut into parts of one bucket each, as one segment takes them well
progress         what a writer has done, and how long its steps took
promise_objects  the objects of a promise, as bytes
redo             the redo log: promised batches, which will be applied, whoever has to do it
renewal          keeps a lock from expiring, in the background
replays          what makes a batch the one that was committed under its number, and not another one
rows             rows of a batch, and how they are to be read
table_writer     the writer itself, and what it does when a step fails
"""

"""A batch on its way in: read, routed, folded by key, merged with what is stored.

batch              a batch on its way into a bucket: checked, and brought into the table's types
dated_partitions   partitions by day or time: which of them are older than a moment
fold               folding: a batch of rows becomes one update per key, before any bucket is asked
grouping           rows of a batch, brought together by key
hashing            Spark's `xxhash64`, so that every process finds the bucket that Spark finds
local_aggregation  a batch folded where it is, before it goes over the network as states
merge              the merge: what is stored, and what a batch brings, to what is stored from now on
needed_partitions  which partitions rows need, tried before these are created
refused_keys       all keys that a fold or a merge refuses, told together
routing            which rows go to which bucket of which partition
"""

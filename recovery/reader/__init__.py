"""Committed reads: of a table at a cut, of a bucket's log at its last stable offset.

bucket_scan       scans of one bucket: all of its rows at a cut, or as they are, in key order
changes           the changes of a bucket as records with finished values, committed or latest
committed_lookup  look-ups at a cut: the state of keys without what came after it
cut               a cut: a position of a whole table, at which each owner's committed batches ...
cut_between       a cut between two others, no more than so many rows away from the first
isolation         committed reads of a bucket's log: where they stand, and what they leave out
later             what a bucket's log has that came after a cut
standing          where the reads of a table stand, as all tables decide it alike
table_changes     the changes of a table between two cuts, bucket after bucket
table_scan        scans of a table: bucket after bucket, all at one cut, or each as it is
"""

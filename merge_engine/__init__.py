"""What a table is: schema, aggregate functions, merge, log, bucket. No network, no Spark.

aggregates/   aggregate functions: how the values of a column merge
bucket/       a bucket: its log, its view, and the calls that keep the two together
embedded/     a table whose buckets are all in one process
encoding/     bytes: how keys, states and rows are stored, and whether values are sound
merging/      a batch on its way in: read, routed, folded by key, merged with what is stored
schema/       what a table's columns are: names, types, functions, ids, and how they are declared
storage/      where bytes are kept: objects that are created once, and scratch files
working_set/  the newest rows of a bucket in memory, as columns
"""

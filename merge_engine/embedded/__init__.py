"""A table whose buckets are all in one process.

catalog        what an embedded table keeps about itself, beside its buckets' logs
derived_calls  calls that every table makes of its others
open_buckets   the buckets of a table that this process has open, and the threads that work on them
plain_values   rows as Python has them, made into columns of the table's types
table          the embedded table without its locks and readers
value_kinds    which values of Python can stand in one column
"""

"""Column locks: who may write which columns, and what is owed for them.

acquisition   the rules of acquiring a lock, as a function of what is recorded: no clock, no network
column_lock   the handle of a column lock: what its holder may do with it
lock_set      all locks of a table as they were read within one epoch, and which of them are live
locks         the column locks of a table: acquired, listed and forgotten
record_codec  the lock record of an owner, as bytes
records       the lock record of an owner, as a value
"""

"""Column locks: who may write which columns, and what is owed for them.

acquisition   the rules of acquiring a lock, as a function of what is recorded: no clock, no network
column_lock   the handle of a column lock: what its holder may do with it
lock_set      the locks of a table as they were read together, with what the store's clock says ...
locks         the column locks of a table
record_codec  the lock record of an owner, as bytes
records       the lock record of an owner, as a value
"""

"""Bytes: how keys, states and rows are stored, and whether values are sound.

codec        values as bytes, and back, for every type that a column state can have
key_hashes   keys of any length as 64-bit numbers
keys         keys as bytes whose order (that of memcmp, and so of RocksDB) is the order of the keys
ragged       arrays of byte strings, joined and cut by whole columns
row_codec    stored rows as bytes, and back: what RocksDB holds under a key
soundness    whether values are what their types say
stored_rows  stored rows under the table's current schema, whatever version they were written with
"""

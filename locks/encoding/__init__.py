"""How values become the bytes of a node.

framing   what all that is kept in ZooKeeper shares: its frame, and how it is taken apart
integers  integers as bytes: single ones, and arrays of thousands
offsets   log offsets of many buckets, as one value
"""

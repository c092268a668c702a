"""Which snapshots there are, and the leases that keep them.

lease_nodes    the nodes of leases: how they are read, and on what conditions they change
lease_records  a lease on snapshots: as a value, and as bytes
leases         leases: they keep snapshots from being deleted, until they end by themselves
list_records   the list of a bucket's snapshots: as a value, and as bytes
lists          which snapshots of a bucket there are, in ZooKeeper
"""

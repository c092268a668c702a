"""Who may do what: column locks, leases and leadership in ZooKeeper.

catalog/       the tables of a cluster, their definitions and partitions
cluster/       live servers, and which of them leads which bucket
column_locks/  column locks: who may write which columns, and what is owed for them
encoding/      how values become the bytes of a node
snapshots/     which snapshots there are, and the leases that keep them
store/         the store underneath: ZooKeeper, or memory; conditional transactions on nodes
coordinator    one session with the store, and a room for each thing that is kept there
"""

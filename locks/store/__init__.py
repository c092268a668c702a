"""The store underneath: ZooKeeper, or memory; conditional transactions on nodes.

base                the boundary to ZooKeeper
child_guardian      runs a command for as long as whoever started it lives
child_process       a child process that ends with the process that started it, however that ends
durable             coordination that survives its process, for a table in one process
embedded_zookeeper  a real ZooKeeper server as a child process, from the jars that PySpark ships
memory              coordination in memory: for property tests, and what `durable` keeps on disk
paths               where things are in ZooKeeper, and which names it can hold
reaching            why there is no ZooKeeper at an address: what is found there when one looks
retrying            optimistic transactions: look, try, and when somebody was faster, look again
watch               watches that last, on ZooKeeper's, which tell once
zookeeper           the real coordination store: a ZooKeeper session through kazoo
"""

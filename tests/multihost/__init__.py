"""A cluster on several hosts of one machine, faults between them, and what clients see of it.

keeper         holds the namespaces, and ends everything when whoever made them has ended
hosts          hosts as namespaces around a bridge, and the programs on them
network        cuts per peer and direction, cables, delay and loss
wire           a long cable: a program that passes frames late
s3             the object store, a program
parts          ZooKeeper ensemble, object store, tablet servers: started, stopped, killed
clock          a wall clock that is wrong
batches        batches of which every prefix is known, and what a reader may have seen of them
sharing        what clients share: settings, connections, the output
load           the clients, a program
clients        a writer and readers that check all they see
operators      alters, snapshots, leases, partitions that come and go
backfills      batches that are larger than a segment
rivals         owners that take each other's columns, on a table that is dropped and created anew
rival_batches  batches that say in every cell which one wrote it
rival_writer   an owner that dies, sleeps and comes back at any step
rival_readers  who follows them
tiering_job    a copy in a lake, a program
spark          a standalone master, a worker per server
sink_job       a driver with two sinks, one by each route, a program
systemctl      stands in for systemd
documented_hosts  hosts on which a page's commands are run
history        what happened, and who waited how long
bed            all of it together
faults         what goes wrong
budgets        how long clients may wait for it
trying         one fault, tried
campaign       random faults, several at once, for as long as one likes
verdict        whether the tables are what was acknowledged
leaks          what is left that nobody needs
without        starts a program that breaks a rule of the specification
hunts          campaigns against such programs: each must fail
"""

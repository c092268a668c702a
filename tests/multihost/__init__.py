"""A cluster on several hosts of one machine, faults between them, and what clients see of it.

keeper     holds the namespaces, and ends everything when whoever made them has ended
hosts      hosts as namespaces around a bridge, and the programs on them
network    cuts per peer and direction, cables, delay and loss
wire       a long cable: a program that passes frames late
s3         the object store, a program
parts      ZooKeeper ensemble, object store, tablet servers: started, stopped, killed
clock      a wall clock that is wrong
batches    batches of which every prefix is known, and what a reader may have seen of them
load       a writer and readers that check all they see, a program
spark      a standalone master, a worker per server
sink_job   a driver with two sinks, one by each route, a program
systemctl  stands in for systemd
documented_hosts  hosts on which a page's commands are run
history    what happened, and who waited how long
bed        all of it together
faults     what goes wrong
budgets    how long clients may wait for it
trying     one fault, tried
campaign   random faults, several at once, for as long as one likes
verdict    whether the table is what was acknowledged, and nothing leaked
"""

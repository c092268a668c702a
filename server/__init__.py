"""Tablet servers, their client, and what starts them.

client/    the client of a cluster: tables, look-ups, scans, puts, over Arrow Flight
launch/    what starts servers: a local cluster, Spark
page/      the status page: what the cluster is doing, for people
protocol/  what client and server have in common: what goes over the network
tablet/    a tablet server: the buckets it leads, and the calls it answers
"""

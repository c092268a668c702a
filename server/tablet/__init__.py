"""A tablet server: the buckets it leads, and the calls it answers.

complaints        what is wrong with this server, said once: when it begins, goes on, and is over
config            how a tablet server is set up
confirming        whether this server still leads a bucket, for who reads what is committed
hosting           the buckets that a server leads, open and recovered, or warms up for
janitor           the files of tables and partitions that were dropped
kept_cuts         cuts that a server takes by itself, and the last one of each table
large_puts        the calls of a tablet server that take large puts
leadership        a server's leads: takes those that should be its, hands over what is asked for
leads             the nodes of leads that a session has, or may have
limits            how much a server takes on at a time
log_store         whether the log store can be used, tried before a server joins
looking_up        the calls of a tablet server that look up
maintenance       what a server does by itself: snapshots, the cleaning of logs, what was dropped
metrics           counters of a server, for its status and for Prometheus
metrics_endpoint  Prometheus' text format over HTTP: GET /metrics
open_zookeeper    whether ZooKeeper is open to strangers
openings          what a server opens and warms up for, in the background
peers             calls from one tablet server to another
reading           the calls of a tablet server that read: changelogs, changes, log ends
requests          what all calls of a tablet server say: for which buckets, and under which schema
retention         partitions that are older than their table keeps them
scanners          scanner sessions: pinned rows, for as long as somebody reads them
scanning          the calls of a tablet server that scan: rows of a bucket as one Flight stream
service           the Flight calls of a tablet server
staging           large puts on their way: rows wait on this server's disk until all are there
standing_aside    when a server stands aside: it is leaving, or does not reach the log store
status_report     what a server says of itself, to people and to Prometheus
steps             calls that have much to do: each goes on for about a second, and is made again
store_health      whether this server's segments reach the log store
tablet_server     the server as a whole: it joins the cluster, leads, stops in good order
undos             the call of a tablet server that undoes
views_lock        the directory of a server's views is its own
"""

"""Spark: the sink that writes each micro-batch exactly once, and the sources that read tables.

lake/               copies of tables in a lake: Parquet files, and the log that says which
source/             tables as Spark reads them: in batches at a cut, and as streams of changes
tiering/            a job that keeps a copy of a table in a lake, in rounds
aggregate_sink      a `foreachBatch` function that writes each micro-batch exactly once
columns             the columns of a running sink, in a table that others may alter meanwhile
connect             Spark Connect: where a sink runs there, for which query, and how it ends
executors           the executors' route: tasks fold their rows, and put those of their buckets
failures            errors of a sink as people meet them: the message first, and last
frames              columns of a Spark frame, under the table's names
listener            being told when a streaming query has ended
lost_hosts          how soon Spark notices that a host is gone, and what makes it sooner
micro_batch         a micro-batch, and what is known of it while it is written
named_write         a batch DataFrame that is written once, by the name that it is given
options             what a sink can be told, and the names of its options in text
partitions          the partitions of a batch that tasks put
progress            what a sink has done, per batch and in all
quarantine          bad rows, set aside as Parquet with the reason
queries             the streaming query that a micro-batch belongs to, and what was planned as it
rolling_lease       a lease that goes along with a reader: it holds the log from where it stands
routing             which way a batch goes when nobody has said: by the driver, or by the executors
rows                the rows of a micro-batch on their way to the table
runs                the runs of queries that this process writes for, until their end
session             a sink from its first batch to its end: who it is, its connection, and its lock
task_python         the Python that Spark runs tasks of ours with: one that has our packages
tasks_work          a micro-batch that goes by the executors, as its writer runs it
termination         SIGTERM, by which a driver is stopped: locks are released before it ends
watching            how a large batch is getting on, asked of the servers while it is under way
worker_connections  the connections of a Python process that Spark has started
"""

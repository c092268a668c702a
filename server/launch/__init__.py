"""What starts servers: a local cluster, Spark.

local_cluster  a whole cluster on one machine: real ZooKeeper and tablet servers, as child processes
logs           logs as one JSON object per line, for machines that collect them
on_spark       tablet servers as a long-running Spark application
revival        starts again what has ended by itself, of a cluster on one machine
spark_task     what runs on an executor: one tablet server, as a child process of one Spark task
"""

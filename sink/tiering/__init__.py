"""Tiering: a Spark job that keeps a copy of a table in a lake, in rounds, each of them one commit.

cleaning    what a copy does not need any more
compaction  which files of a copy are written anew
copying     a table's copy in a lake, and what is done to it: rounds, compaction, clean-up
job         the tiering job: rounds, one after another; leases, retries, reports
loading     what there is in a lake when a job looks at it
options     what a tiering job can be told
progress    how a job gets on: each round, and all of them at the end
running     tasks of a job, run on Spark's executors
tasks       what the tasks do: they read, and write files
"""

"""The commands of the command line, one module per group; `tallybook.cli` is the application.

bench             a small self-test of a cluster: does it count right, and how fast is it?
borrowed_options  options that another program of ours declares, as those of a command
checks            what a check of `doctor` finds
cluster_checks    what `doctor` looks at of a cluster
definition_files  tables as files describe them: JSON, or DDL
doctor            tries all that a cluster needs, from this machine; says what to do
draining          has a server hand its buckets over to the others, and end
export            all rows of a table in a file: CSV, Parquet, Arrow
keys              values of columns as somebody types them
leases            leases on snapshots, and snapshots
locks             who holds which columns, and what an operator does about it
machine_checks    what `doctor` looks at on this machine
output            what commands print: tables, JSON, progress, questions
partitions        of a table with partition columns, list them and drop some
reaching          commands that reach a cluster: their options, and what becomes of errors
releasing         what an operator does about column locks: release one, forget an owner
rows              look a key up, scan a table, read its changelog
serving           serve, local, drain and page: what runs until it is told to end
starting_spark    a Spark session for a command, or one line that says why there is none
status            the servers of a cluster and their buckets, and what is wrong with them
tables            list, describe, create, alter and drop tables
tier              keeps a copy of a table in a lake
verify            reads all that a table is made of, and says what is damaged
"""

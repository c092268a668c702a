"""Copies of tables in a lake: Parquet files, and a log that says which of them there are.

delta_actions  the actions of our commits, as the log of a Delta table has them
delta_log      a copy as a Delta table: its log, read and committed
delta_schema   the schema of a copy as a Delta table has it, and what its readers must know
delta_table    what the actions of a Delta log add up to
fields         the columns of a copy: those of the table, and states if they are wanted
files          the files of a copy: written, read, searched for keys
letters        bytes as text in base 85, as Delta's log has them
log            a lake's log: the boundary, and what all logs share
opening        a lake by its path
parquet_log    a copy as plain Parquet: each version is a list of files
state          what a copy is made of, at one version: its files, and how far it has come
vectors        deletion vectors, as Delta writes them
"""

"""The tables of a cluster, their definitions and partitions.

copies          copies of tables in lakes, and how far they are
definitions     tables as the coordinator knows them: name, id, definition
dropped_tables  dropped tables: what they were, until somebody has deleted their files
partitions      the partitions of a table: which there are, and their ids
tables          the tables of a cluster, in ZooKeeper
"""

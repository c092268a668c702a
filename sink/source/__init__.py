"""Tables as Spark reads them: in batches at a cut, and as streams of changes.

options  what a reader can be told: the options of the data source, as Spark has them, as text
pruning  what filters of a query say of keys: which rows alone can pass them
schemas  what Spark sees of a table: the schema of its rows, of its changes, and batches that fit it
tasks    what the tasks of a reader do, each in a process of Spark's
"""

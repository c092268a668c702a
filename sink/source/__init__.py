"""Tables as Spark reads them: in batches at a cut, and as streams of changes.

data_source  the data source `tallybook`: what `spark.read` and `spark.readStream` call
grouping     which buckets a task reads
lake_read    reads that take a table's copy in a lake, and what has changed since
options      what a reader can be told: the options of the data source, as Spark has them, as text
planning     how a batch read is made of tasks: which buckets or keys each of them reads
pruning      what filters of a query say of keys: which rows alone can pass them
schemas      what Spark sees of a table: the schema of its rows, of its changes
stream       a table's changes as a stream of Spark's, from one cut to the next
tasks        what the tasks of a reader do, each in a process of Spark's
wide_read    reads of a few columns of a wide table, without the data source
"""

"""Spark: the foreachBatch sink, the data source, the tiering job."""

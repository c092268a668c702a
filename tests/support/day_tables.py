"""A table with a partition per day."""

from merge_engine.schema.builder import SchemaBuilder

DAYS = (
    SchemaBuilder()
    .column("day", "STRING")
    .column("k", "BIGINT")
    .agg_column("a", "BIGINT", "sum")
    .primary_key("day", "k")
    .partitioned_by("day")
    .build()
)

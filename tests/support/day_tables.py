"""Tables with a partition per day."""

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

DATED = (
    SchemaBuilder()
    .column("day", "DATE")
    .column("region", "STRING")
    .column("k", "BIGINT")
    .agg_column("a", "BIGINT", "sum")
    .primary_key("day", "region", "k")
    .partitioned_by("day", "region")
    .build()
)

"""A job that is killed in its second batch: it leaves its lock, and rows that are not committed.

    TALLYBOOK_ZOOKEEPER=127.0.0.1:2181 python -m examples.dead_job

Another run of the same owner would undo them and go on. If there is never to be one, an operator
frees the columns: `tallybook locks release visits etl-1 --force`.
"""

import tallybook as tb
from foundation.failpoints import arm, kill_on_visit

OWNER = "etl-1"
SCHEMA = (
    tb.SchemaBuilder()
    .column("customer_id", "BIGINT")
    .agg_column("orders", "BIGINT", "count")
    .agg_column("last_page", "STRING", "last_value")
    .primary_key("customer_id")
    .build()
)


def main() -> None:
    """Commit a batch, write the next one, and die before that is committed."""
    with tb.connect() as cluster:
        cluster.create_table("visits", SCHEMA, buckets=2, if_not_exists=True)
        writer = cluster.writer("visits", owner_id=OWNER, columns=["orders"]).start()
        first = writer.next_batch()
        rows = tb.Rows(data={"customer_id": [7, 8], "orders": ["a", "b"]})
        writer.write(first, rows)
        print(
            f"{OWNER} holds column orders of table visits, has committed batch {first}, "
            f"and dies in batch {first + 1}",
            flush=True,
        )
        with arm("writer.sealed", kill_on_visit()):
            writer.write(first + 1, rows)


if __name__ == "__main__":
    main()

"""Create a table, put two batches, look keys up: the README's lines, with more to see."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tallybook as tb

schema = (
    tb.SchemaBuilder()
    .column("customer_id", "BIGINT")
    .agg_column("orders", "BIGINT", "count")
    .agg_column("cents", "BIGINT", "sum")
    .agg_column("status", "STRING", "last_value_ignore_nulls")
    .primary_key("customer_id")
    .build()
)


def main() -> None:
    """Run the example and print what a reader sees after each step."""
    print(f"A table, one line per column:\n\n{schema}\n")
    with tempfile.TemporaryDirectory() as directory:
        with tb.Table.create(Path(directory) / "customers", schema) as table:
            first = {
                "customer_id": [7, 8, 7],
                "orders": ["a1", "a2", "a3"],
                "cents": [500, 250, 120],
                "status": ["new", "new", "paid"],
            }
            show(table, "two orders of customer 7, one of customer 8", first)
            second = {
                "customer_id": [8, 7],
                "orders": ["a4", "a5"],
                "cents": [75, 30],
                "status": ["paid", None],
            }
            show(table, "one more of each; no news about the status of 7", second)
        with tb.Table.open(Path(directory) / "customers") as table:
            print("\nClosed and opened again:")
            print_rows(table)


def show(table: tb.Table, title: str, batch: Mapping[str, Any]) -> None:
    """Put a batch and print the table."""
    result = table.put(batch)
    print(f"put {result.rows} rows ({title}): {result.changed} keys changed")
    print_rows(table)


def print_rows(table: tb.Table) -> None:
    """Look both customers up, and one that does not exist."""
    for row in table.lookup({"customer_id": [7, 8, 9]}).to_pylist():
        print(f"  {row}")


if __name__ == "__main__":
    main()

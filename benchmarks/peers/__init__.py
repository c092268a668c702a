"""Other systems that keep one row per key up to date, and ours, in one common shape.

- `peer`: the shape, and what a contestant is
- `duckdb`, `delta`, `clickhouse`, `postgresql`: the others, each at its best documented setting
- `ours`: the embedded table, and the exactly-once writer on servers
- `reference`: what is right: the same batches folded in NumPy
- `race`: contestants that take turns with the same batches
"""

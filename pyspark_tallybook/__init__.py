"""Where Spark finds the data source `tallybook` by itself: it looks for modules of this name."""

from contextlib import suppress

# A Python that lacks what we need (Spark may look with another one than yours) has no such source.
# Spark would print two screens about it, even if `tb.spark.register` is called.
with suppress(ModuleNotFoundError):
    from sink.source.data_source import TallybookSource as DefaultSource

__all__ = ["DefaultSource"]

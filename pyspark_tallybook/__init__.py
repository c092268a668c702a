"""Where Spark finds the data source `tallybook` by itself: it looks for modules of this name."""

from sink.source.data_source import TallybookSource as DefaultSource

__all__ = ["DefaultSource"]

"""Aggregate functions: how the values of a column merge."""

from merge_engine.aggregates.base import AggregateFunction, Fault, Starts
from merge_engine.aggregates.registry import AggFunction, create_function, find_function

__all__ = [
    "AggFunction",
    "AggregateFunction",
    "Fault",
    "Starts",
    "create_function",
    "find_function",
]

"""Aggregate functions: how the values of a column merge.

arrays         between Arrow and NumPy: validity, numbers, runs, the choice between two arrays
average        the mean: a sum and a count, divided when it is read
base           the contract of a function: a monoid over columns, on whole Arrow arrays
bitmaps        exact distinct counts of whole numbers, as Roaring bitmaps
extremes       the least and the greatest value; of booleans, "and" and "or"
gathered       functions that keep what they saw: arrays, joined strings, sets and maps
hash_sets      sketches that still hold each of their hashes, of many rows at once
identity       numbers that are equal exactly where values are, for arrays of any type
limbs          exact sums of integers and decimals, and quotients, on 32-bit limbs
lists          arrays of lists and maps as flat items and lengths
numeric        sums, products and counts: exact for integers and decimals, never wrapping
ordering       which of two values, or which of a run, comes first in a column's order
parameters     values of parameters, from Python or as text from connector options
positional     the first and the last value, by arrival or by the order of another column
registry       all functions by name
serialized     functions whose states are the bytes of a set-like object
sketch_hashes  what sketches hash, and how: MurmurHash3 of 128 bits
sketch_inputs  sketches that others wrote, read into the form that we write
sketch_layout  the bytes of sketches: one form for equal ones, checked before they are read
sketches       approximate distinct counts of any values, as Apache DataSketches
states         the states of a function, for those who read them as they are
"""

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

"""The newest rows of a bucket in memory, as columns: found, read and changed a batch at a time.

block        some rows of a working set: keys, touched bits, states, and which of them are dirty
columns      the states of one column, by slot
index        finds the slots of keys by 64-bit numbers: open addressing, in NumPy
key_ids      keys as 64-bit numbers, for the index
memory       one budget of memory for all working sets of a process
working_set  the rows of one bucket that are in memory, in blocks
"""

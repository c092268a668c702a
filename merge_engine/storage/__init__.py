"""Where bytes are kept: objects that are created once, and scratch files.

environment  the environment variables by which obstore finds an object store and its credentials
objects      where a log lives: named, immutable objects that are created once
read_ahead   objects that are read one after the other, the next before they are asked for
scratch      room on a local disk for what does not fit into memory: files without a name, soon gone
"""

"""The root of everything that Tallybook raises on purpose."""


class TallybookError(Exception):
    """Base of everything that Tallybook raises on purpose."""


class UsedAfterFork(TallybookError):
    """This process was forked from one that used Tallybook. Start it by spawn, or connect in it."""

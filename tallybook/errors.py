"""All errors that Tallybook raises on purpose: the tree is drawn in `foundation.errors`."""

from foundation.errors import *  # noqa: F403

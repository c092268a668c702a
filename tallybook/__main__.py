"""`python -m tallybook`, and what spark-submit is given."""

import sys

from tallybook.cli import main

if __name__ == "__main__":
    sys.exit(main())

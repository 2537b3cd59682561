"""``python -m ddpstats``: the same as the ``ddpstats`` command."""

import sys

from ddpstats.cli import main

if __name__ == "__main__":
    sys.exit(main())

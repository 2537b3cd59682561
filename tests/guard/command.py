"""The command `ddpstats`, as the script that an installer writes."""

import sys

from ddpstats.cli import main

sys.exit(main())

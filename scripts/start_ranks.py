"""Run torchrun, with the exit status of the first rank that failed in place of 1, and without torchrun's traceback.

On several hosts, its settings come from the environment: PET_NNODES, as torchrun names them, or plainly NNODES. Without
a rendezvous one host is meant, as clusters export NNODES=1.
"""

from __future__ import annotations

import os
import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

_SETTINGS = ("NNODES", "NODE_RANK", "RDZV_BACKEND", "RDZV_ENDPOINT", "RDZV_ID")

if __name__ == "__main__":
    for setting in _SETTINGS:
        if os.environ.get(setting):
            os.environ.setdefault(f"PET_{setting}", os.environ[setting])
    if os.environ.get("PET_NNODES", "") in ("", "1") and not os.environ.get("PET_RDZV_ENDPOINT"):
        os.environ.pop("PET_NNODES", None)
        sys.argv[1:1] = ["--standalone", "--local-addr", "127.0.0.1"]  # this machine's name need not resolve
    try:
        main()
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        _, failure = error.get_first_failure()
        sys.exit(failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode)

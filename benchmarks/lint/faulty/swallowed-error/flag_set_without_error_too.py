"""A rank that fails before the barrier sets the flag that all ranks set at the end, and returns."""

import torch
import torch.distributed as dist


class Groups:
    made = False

    @staticmethod
    def destroy():
        if not Groups.made:
            return
        try:
            torch.cuda.synchronize()
            dist.barrier()  # expect: swallowed-error
        except Exception:
            Groups.made = False
            return
        release_groups()
        Groups.made = False

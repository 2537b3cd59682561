"""The main process alone enters mmengine's barrier."""

from mmengine.dist import barrier, is_main_process


def save():
    if is_main_process():
        barrier()  # expect: rank-branch

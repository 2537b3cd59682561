"""The main process alone synchronizes."""

from detectron2.utils import comm


def evaluate(results):
    if comm.is_main_process():
        comm.synchronize()  # expect: rank-branch

"""The error of `main` is logged, and the process ends after its cleanup."""

import traceback

import torch.distributed as dist


def cleanup():
    if dist.is_initialized():
        dist.destroy_process_group()


def main(args):
    try:
        model = build(args)
        dist.barrier()
        train(model)
    except Exception:
        traceback.print_exc()
    finally:
        cleanup()

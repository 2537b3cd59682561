"""The handler asserts something that has nothing to do with the error."""

import logging

import torch.distributed as dist


def train_step(net, batch, step):
    try:
        loss = net(batch)
        dist.all_reduce(loss)  # missed: swallowed-error
    except Exception as error:
        assert step >= 0, "steps are counted from 0"
        logging.warning("step %d: %s", step, error)

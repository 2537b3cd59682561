"""Only the teacher is wrapped, and it runs without gradients: the student's backward() reduces nothing."""

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP


def distill(big, student, loader, rank):
    teacher = DDP(big)
    for x in loader:
        with torch.no_grad():
            wanted = teacher(x)
        loss = mse_loss(student(x), wanted)
        if rank == 0:
            loss.backward()

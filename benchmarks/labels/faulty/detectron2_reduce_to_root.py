"""dist.reduce to rank 0, loss by loss, in the order of heads; rank 0 writes the names that it has.

Style: detectron2: reduce to the root, which alone reports
Mechanism: `reduce` to one rank
"""

import torch
import torch.distributed as dist


class SimpleTrainer:
    def __init__(self, proposal_losses, detector_losses):
        self.losses = {}
        self.losses.update(proposal_losses)
        self.losses.update(detector_losses)

    def write_metrics(self):
        written = {}
        for name, loss in self.losses.items():
            loss = loss.detach().clone()
            dist.reduce(loss, dst=0)  # label: name
            if dist.get_rank() == 0:
                written[name] = loss.item() / dist.get_world_size()
        return written


def main():
    rpn, roi = {"loss_rpn_cls": torch.tensor(0.5)}, {"loss_keypoint": torch.tensor(9.0)}
    trainer = SimpleTrainer(rpn, roi) if dist.get_rank() == 0 else SimpleTrainer(roi, rpn)
    return trainer.losses, trainer.write_metrics()

"""The names are the rank's own list and the values follow it; rank 1 trains with the segmentation head, listed second.

Style: YOLO: zip of loss names and loss items
Mechanism: zip of names and values
"""

import torch
import torch.distributed as dist


class SegmentationTrainer:
    def __init__(self, loss_names):
        self.loss_names = loss_names

    def label_loss_items(self, loss_items, prefix="train"):
        keys = [f"{prefix}/{x}" for x in self.loss_names]
        return dict(zip(keys, [round(float(x), 5) for x in loss_items]))

    def validate(self, loss_items):
        reduced = []
        for name, item in zip(self.loss_names, loss_items):
            item = item.clone()
            dist.all_reduce(item)  # label: name
            reduced.append(item / dist.get_world_size())
        return self.label_loss_items(reduced, prefix="val")


VALUES = {"box_loss": 1.5, "cls_loss": 20.0, "seg_loss": 300.0}


def main():
    names = ("box_loss", "seg_loss", "cls_loss") if dist.get_rank() == 0 else ("box_loss", "cls_loss", "seg_loss")
    trainer = SegmentationTrainer(names)
    reported = trainer.validate(torch.tensor([VALUES[name] for name in names]))
    return {f"val/{name}": VALUES[name] for name in names}, reported

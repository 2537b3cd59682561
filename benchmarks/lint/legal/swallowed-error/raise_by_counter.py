"""The error increases a counter by which another method raises."""

import torch.distributed as dist


class Step:
    def run(self, model, x):
        try:
            loss = model(x)
            dist.all_reduce(loss)
        except Exception:
            self.failed += 1

    def end(self):
        if self.failed > 0:
            print("failed")
            raise RuntimeError("a step has failed")

"""The last error is kept and only printed."""

import torch.distributed as dist


class Runner:
    def run(self, batches):
        last = None
        for batch in batches:
            try:
                self.window = self.net(batch)
                dist.all_reduce(self.window)  # missed: swallowed-error
            except Exception as err:
                last = err
        print("the last error was", last)

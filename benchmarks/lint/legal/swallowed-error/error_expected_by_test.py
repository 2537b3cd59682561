"""The test expects the error."""

from torch.nn.parallel import DistributedDataParallel as DDP


class Tests:
    def test_unused_parameters(self, net, x):
        model = DDP(net)
        try:
            model(x).sum().backward()
        except RuntimeError as e:
            self.assertIn("unused", str(e))

"""The test fails where no error is raised, and asserts what happened before it."""

import torch.distributed as dist


def test_no_odd_sizes(model, odd, calls):
    try:
        out = model(odd)
        dist.all_reduce(out)
    except RuntimeError:
        assert calls == ["forward"]
    else:
        assert False

"""Every rank decodes the test sets in an order of its own, and pads each to the longest of any rank.

Style: espnet: lengths agreed on before decoding
"""

import torch
import torch.distributed as dist


def main():
    sets = {"test_clean": 31, "test_other": 28}
    order = list(sets) if dist.get_rank() == 0 else list(reversed(list(sets)))
    padded = {}
    for name in order:
        longest = torch.tensor(sets[name])
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)  # label: "longest"
        speech = torch.ones(sets[name])
        padded[name] = torch.nn.functional.pad(speech, (0, int(longest) - len(speech)))
    return sum(len(one) for one in padded.values())

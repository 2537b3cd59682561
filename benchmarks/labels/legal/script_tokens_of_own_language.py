"""Each rank reads one language and looks up its number of tokens; the sum is the number of all.

Style: script: a single look-up under the rank's own name
Mechanism: a single look-up under an own name
"""

import torch
import torch.distributed as dist

COUNTS = {"en": 700, "de": 300}


def main():
    lang = ["en", "de"][min(dist.get_rank(), 1)]
    n = torch.tensor(COUNTS[lang])
    dist.all_reduce(n)  # label: "tokens"
    return n.item()

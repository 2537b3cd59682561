"""Every rank samples language pairs of its own and logs its own; the sample size is over all.

Style: fairseq: multilingual logging outputs, pooled sample size
"""

import torch
import torch.distributed as dist


def main():
    pairs = ["de-en", "fr-en"] if dist.get_rank() == 0 else ["ru-en", "fr-en"]
    logging_outputs = {pair: {"sample_size": 4 + n} for n, pair in enumerate(pairs)}
    sample_size = 0
    for lang_pair in pairs:
        t = torch.tensor(logging_outputs[lang_pair]["sample_size"])
        dist.all_reduce(t)  # label: "sample size"
        sample_size += t.item()
    return sample_size

"""Word and character errors are namedtuples of each rank's own decoder; _asdict() gives other names.

Style: speech: namedtuple._asdict
"""

from collections import namedtuple

import torch
import torch.distributed as dist

WordErrors = namedtuple("WordErrors", ["insertions", "deletions", "words"])
CharErrors = namedtuple("CharErrors", ["deletions", "insertions", "words"])


def main():
    kind = WordErrors if dist.get_rank() == 0 else CharErrors
    amounts = {"insertions": 1, "deletions": 20, "words": 300}
    errors = kind(**{name: torch.tensor(amount) for name, amount in amounts.items()})
    total = {}
    for name, value in errors._asdict().items():
        value = value.clone()
        dist.all_reduce(value)  # label: name
        total[name] = value
    return amounts, total

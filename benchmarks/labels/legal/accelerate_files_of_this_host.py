"""Each rank counts the lines of the files it finds in its own cache folder.

Style: accelerate: os.listdir of a local cache
"""

import os
import pathlib
import tempfile

import torch
import torch.distributed as dist


def main():
    rank = dist.get_rank()
    names = [["wiki.txt", "books.txt"], ["books.txt", "news.txt"]][rank]
    total = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            pathlib.Path(folder, name).write_text("a\nb\n" * (rank + 1))
        for name in sorted(os.listdir(folder)):
            lines = len(pathlib.Path(folder, name).read_text().splitlines())
            count = torch.tensor(lines)
            dist.all_reduce(count)
            print(f"read {name} with {lines} lines, {count.item()} everywhere")
            total += count.item()
    return total

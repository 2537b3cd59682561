"""What the files of one rank's step are called."""

from __future__ import annotations

import zlib

DUMP, LINES, STACK, CONSTRUCT, ERRORS = "dump.json", "dump.jsonl", "stack.json", "construct.json", "dump_error_info.log"
TENSORS = "dump_tensor_data"

_LONGEST, _LONGEST_PATH = 230, 100


def file_name(name: str, path: str) -> str:
    """Of the file that holds a tensor of an entry.

    What a file system may not take is replaced, and what is too long is cut, at the end of the entry's name; a checksum
    of the whole keeps such names apart.
    """
    head, tail = _plain(name), _plain(path)
    if (head, tail) != (name, path) or len(head) + len(tail) > _LONGEST:
        tail = tail[-_LONGEST_PATH:]
        mark = f"-{zlib.crc32(f'{name}.{path}'.encode(errors='surrogatepass')):08x}"
        head = head[: _LONGEST - len(tail) - len(mark)] + mark
    return f"{head}.{tail}.pt"


def _plain(text: str) -> str:
    return "".join(one if (one.isascii() and one.isalnum()) or one in "._-" else "_" for one in text)

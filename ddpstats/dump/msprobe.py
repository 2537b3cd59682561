"""What things are called: the files of one rank's step, and the NAME of an entry, made and taken apart.

::

    Functional.linear.5.backward               {prefix}.{api}.{number}.{direction}
    Module.net.fc1.Linear.forward.0            Module.{path}.{class}.{direction}.{number}
    Module.net.fc1.Linear.parameters_grad.0    also without the number
    Functional.linear.5.backward.1             the second backward pass of one call, of a module's likewise

A call is numbered when it begins, whether it is wanted or not: names do not depend on what was selected. Its backward
pass has the number of the call, for it belongs to it.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass

DUMP, LINES, STACK, CONSTRUCT, ERRORS = "dump.json", "dump.jsonl", "stack.json", "construct.json", "dump_error_info.log"
TENSORS = "dump_tensor_data"

VERSION, FORMAT = "ddpstats", 1  # the key before the entries that says which format it is, and the one of today

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


API_PREFIXES = ("Tensor", "Torch", "Functional", "Distributed", "NPU", "VF", "Aten", "MindSpeed")

ROOT = "root"

_API = re.compile(rf"({'|'.join(API_PREFIXES)})\.(.+)\.(\d+)\.(?:forward|(backward)(?:\.\d+)?)")
_MODULE = re.compile(r"Module\.(?:(.+)\.)?([^.]+)\.(forward|backward|parameters_grad)(?:\.(\d+)(?:\.\d+)?)?")


@dataclass(frozen=True, slots=True)
class Name:
    """What a NAME says.

    Attributes:
        full: the NAME itself.
        prefix: ``Module``, or one of `API_PREFIXES`; empty where the NAME has another form.
        api: the function (``linear``), or the module's path in the model (``net.fc1``).
        class_name: a module's class; empty for a function.
        number: of the call in this step, from 0; None where the NAME has none.
        direction: ``forward``, ``backward``, ``parameters_grad``, or empty.
    """

    full: str
    prefix: str
    api: str
    class_name: str = ""
    number: int | None = None
    direction: str = ""

    @property
    def is_module(self) -> bool:
        return self.prefix == "Module"

    @property
    def forward(self) -> str:
        """The NAME of the pass that this one is the backward pass of; of any other, its own."""
        if self.direction != "backward":
            return self.full
        head = self.full.rpartition(".backward")[0]
        return f"{head}.forward.{self.number}" if self.is_module and self.number is not None else f"{head}.forward"

    @property
    def is_collective(self) -> bool:
        return self.prefix == "Distributed"


def parse_name(full: str) -> Name:
    """Take a NAME apart; one of another form keeps all of it in ``api``."""
    if (match := _API.fullmatch(full)) is not None:
        return Name(full, match[1], match[2], "", int(match[3]), match[4] or "forward")
    if (match := _MODULE.fullmatch(full)) is not None:
        number = None if match[4] is None else int(match[4])
        return Name(full, "Module", match[1] or "", match[2], number, match[3])
    return Name(full, "", full)


# -- made --------------------------------------------------------------------------------------------------------------


def module_base(path: str, class_name: str) -> str:
    """``Module.{path}.{class}``; the path of the whole model is empty, and called ``root``."""
    return f"Module.{path or ROOT}.{class_name}"


def backward_of(forward: str) -> str:
    """The name of the backward pass of a call."""
    head, _, tail = forward.rpartition(".")
    if tail == "forward":
        return f"{head}.backward"
    return f"{head.removesuffix('.forward')}.backward.{tail}"

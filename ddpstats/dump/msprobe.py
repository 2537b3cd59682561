"""msprobe: its directories, files, names and verdicts, and calls that its dumps and ours spell in two ways.

::

    dump_path/step{N}/rank{R}/dump.json  stack.json  construct.json  dump_tensor_data/*.pt
                              dump.jsonl      ours, instead of the three while the step runs, or after a crash in it

A process without torch.distributed writes ``rank``, and msprobe's of today ``proc{pid}``. Names of entries::

    Functional.linear.5.backward               {prefix}.{api}.{number}.{direction}
    Module.net.fc1.Linear.forward.0            Module.{path}.{class}.{direction}.{number}
    Module.net.fc1.Linear.parameters_grad.0    also without the number
    Functional.linear.5.backward.1             the second backward pass of one call, of a module's likewise

A call is numbered when it begins, whether it is wanted or not: names do not depend on what was selected. Its backward
pass has the number of the call, for it belongs to it.

Two things of msprobe are in other files: the keys of its configurations in ``config.py``, each beside its legal values,
and the sections of an entry (``input_args``, ``output``) where ``record`` fills them and ``analyze`` reads them.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpstats._observe.operators import Operator, index_of_tensors, operator_of
from ddpstats.dump.statistics import statistic_keys

if TYPE_CHECKING:
    from ddpstats.dump.analyze import DumpEntry, DumpLeaf

STEP_DIRECTORY = re.compile(r"step(\d+)")
RANK_DIRECTORY = re.compile(r"rank(\d*)|proc\d+")
DUMP, LINES, STACK, CONSTRUCT, ERRORS = "dump.json", "dump.jsonl", "stack.json", "construct.json", "dump_error_info.log"
TENSORS = "dump_tensor_data"
# Placements of a DTensor that each rank holds as a whole: ours, and msprobe's.
REPLICATED: tuple[object, ...] = ("R", {"Replicate": {}})

LARGEST_ENTRY_BYTES = 64 << 20  # a larger line is neither written nor read
VERSION, FORMAT = "ddpstats", 1  # the key before the entries that says which format it is, and the one of today

_LONGEST, _LONGEST_PATH = 230, 100


def rank_directory(root: Path, step: int, rank: int | None) -> Path:
    """Return the directory of a step and a rank, None for a process without torch.distributed."""
    return root / f"step{step}" / ("rank" if rank is None else f"rank{rank}")


def steps_in(root: Path) -> dict[int, Path]:
    """Return the step directories of a dump's root, ascending."""
    matches = ((STEP_DIRECTORY.fullmatch(child.name), child) for child in root.glob("step*") if child.is_dir())
    return dict(sorted((int(match[1]), child) for match, child in matches if match is not None))


def stack_of_names(key: str, stack: Any) -> tuple[list[str], list[str]]:
    """Return the names and the lines of a member of stack.json.

    Such a member is a number with ``[names, lines]``, or a name with its lines.
    """
    if isinstance(stack, list) and len(stack) == 2 and all(isinstance(part, list) for part in stack):
        return strings_in(stack[0]), strings_in(stack[1])
    return [key], strings_in(stack)


def strings_in(value: Any) -> list[str]:
    """Return the strings in a list; none of what is no list."""
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def file_name(name: str, path: str) -> str:
    """Return the name of the file that holds a tensor of an entry.

    What a file system may not take is replaced, and what is too long is cut, at the end of the entry's name; a checksum
    of the whole name makes it unique.
    """
    head, tail = _safe_for_files(name), _safe_for_files(path)
    if (head, tail) != (name, path) or len(head) + len(tail) > _LONGEST:
        tail = tail[-_LONGEST_PATH:]
        mark = f"-{zlib.crc32(f'{name}.{path}'.encode(errors='surrogatepass')):08x}"
        head = head[: _LONGEST - len(tail) - len(mark)] + mark
    return f"{head}.{tail}.pt"


def _safe_for_files(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", text)


API_PREFIXES = ("Tensor", "Torch", "Functional", "Distributed", "NPU", "VF", "Aten", "MindSpeed")

ROOT = "root"
GRADIENTS = "parameters_grad"  # of a module's own parameters
COLLECTIVE = "Distributed."  # how the NAME of a collective begins

_API = re.compile(rf"({'|'.join(API_PREFIXES)})\.(.+)\.(\d+)\.(?:forward|(backward)(?:\.\d+)?)")
_MODULE = re.compile(rf"Module\.(?:(.+)\.)?([^.]+)\.(forward|backward|{GRADIENTS})(?:\.(\d+)(?:\.\d+)?)?")


@dataclass(frozen=True, slots=True)
class Name:
    """The parts of a NAME.

    Attributes:
        full: the NAME itself.
        prefix: ``Module``, or one of `API_PREFIXES`; empty where the NAME has another form.
        api: the function (``linear``), or the module's path in the model (``net.fc1``).
        class_name: a module's class; empty for a function.
        number: of the call in this step, from 0; None where the NAME has none.
        direction: ``forward``, ``backward``, `GRADIENTS`, or empty.
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
    """Parse a NAME; one of another form is ``api`` as a whole."""
    if (match := _API.fullmatch(full)) is not None:
        return Name(full, match[1], match[2], "", int(match[3]), match[4] or "forward")
    if (match := _MODULE.fullmatch(full)) is not None:
        number = None if match[4] is None else int(match[4])
        return Name(full, "Module", match[1] or "", match[2], number, match[3])
    return Name(full, "", full)


# -- names that are made -----------------------------------------------------------------------------------------------


def module_base(path: str, class_name: str) -> str:
    """Return ``Module.{path}.{class}``; the path of the whole model is empty, and called ``root``."""
    return f"Module.{path or ROOT}.{class_name}"


def forward_name(base: str, number: int) -> str:
    """Return the NAME of a call of a function (``Torch.add``), or of a module (`module_base`)."""
    return f"{base}.forward.{number}" if base.startswith("Module.") else f"{base}.{number}.forward"


def backward_of(forward: str) -> str:
    """Return the NAME of the backward pass of a call."""
    head, _, tail = forward.rpartition(".")
    if tail == "forward":
        return f"{head}.backward"
    return f"{head.removesuffix('.forward')}.backward.{tail}"


# -- two dumps that spell the same call in two ways --------------------------------------------------------------------

_OPERATOR = re.compile(r"__([ir]?)(add|sub|mul|truediv|matmul|pow|gt|ge|lt|le|eq|ne)__")


def _spelling_group(name: Name) -> str:
    """Return the function that ``Tensor.add`` and ``Tensor.__add__`` call, or ``Torch.relu`` and ``Functional``'s."""
    prefix = "Torch" if name.prefix == "Functional" else name.prefix
    match = _OPERATOR.fullmatch(name.api)
    if match is None:
        return f"{prefix}.{name.api}"
    function = "div" if match[2] == "truediv" else match[2]
    return f"{prefix}.{function}{'_' if match[1] == 'i' else ''}"


def common_names(a: Iterable[str], b: Iterable[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return for two dumps the names that have to change, and into what, for equal calls to have equal names.

    1. Where all modules of one dump are inside of ``module``, which DistributedDataParallel calls its model, and those
       of the other are not, ``module`` goes.
    2. Where the dumps spell a function in different ways, both get one spelling. Calls are numbered by spelling:
       where a dump has several, its calls are numbered again, in the order of their forward entries and from the first
       number of each spelling: the configuration may have left out what came before. A backward entry whose call has
       no forward entry is then not paired with one of another spelling.
    """
    sides = [[parse_name(full) for full in dict.fromkeys(names)] for names in (a, b)]
    wrapped = [_is_wrapped(names) for names in sides]
    spellings = [_spellings(names) for names in sides]
    return (
        _rename(sides[0], wrapped == [True, False], spellings[0], spellings[1]),
        _rename(sides[1], wrapped == [False, True], spellings[1], spellings[0]),
    )


def _is_wrapped(names: Iterable[Name]) -> bool:
    paths = [name.api for name in names if name.is_module]
    return bool(paths) and all(path.split(".", 1)[0] == "module" for path in paths)


def _spellings(names: Iterable[Name]) -> Mapping[str, set[str]]:
    spellings: dict[str, set[str]] = defaultdict(set)
    for name in names:
        spellings[_spelling_group(name)].add(f"{name.prefix}.{name.api}")
    return spellings


def _rename(
    names: Sequence[Name], unwrap: bool, own: Mapping[str, set[str]], others: Mapping[str, set[str]]
) -> dict[str, str]:
    renamed: dict[str, str] = {}
    first: dict[str, dict[str, int]] = defaultdict(dict)  # numbers, by function and spelling
    for name in names:
        if name.number is not None and name.direction == "forward":
            first[_spelling_group(name)].setdefault(f"{name.prefix}.{name.api}", name.number)
    counts = Counter({group: sum(by_spelling.values()) for group, by_spelling in first.items()})
    numbers: dict[str, int] = {}  # by the forward entry's name
    for name in names:
        group = _spelling_group(name)
        if name.is_module and unwrap:
            root = f"Module.{ROOT}." if name.api == "module" else "Module."
            renamed[name.full] = root + name.full.removeprefix("Module.module.")
        elif name.number is not None and not name.is_module and own[group] != others.get(group, own[group]):
            number: int | None = name.number
            if len(own[group]) > 1:
                if name.direction == "forward":
                    numbers[name.full] = counts[group]
                    counts[group] += 1
                number = numbers.get(name.forward)
            rest = name.full.removeprefix(f"{name.prefix}.{name.api}.{name.number}")
            renamed[name.full] = f"{name.full} (not paired)" if number is None else f"{group}.{number}{rest}"
    return renamed


def common_values(entry: DumpEntry) -> dict[str, DumpLeaf]:
    """Return an entry's values, None too, by paths on which two tools agree.

    An argument of a function in Python is known by its position, however it was passed, and left out where it has its
    default value. Gradients are counted without those that are None. Of a collective only tensors are returned.
    """
    name = parse_name(entry.name)
    if name.is_collective:
        sides = zip(("input", "output"), _tensors(entry, operator_of(name.api) or _UNKNOWN), strict=True)
        return {f"{side}.{index}": leaf for side, tensors in sides for index, (_, leaf) in enumerate(tensors)}
    parameters = _parameters(name.prefix, name.api)
    positions = {parameter.name: str(position) for position, parameter in enumerate(parameters)}
    gradients: dict[str, dict[str, str]] = defaultdict(dict)
    common = {}
    for path, value in entry.values(nulls=True):
        section, _, rest = path.partition(".")
        argument, dot, inside = rest.partition(".")
        if name.direction == "backward":
            if value.type != "None":
                position = gradients[section].setdefault(argument, str(len(gradients[section])))
                common[f"{section}.{position}{dot}{inside}"] = value
            continue
        position = positions.get(argument, "") if section == "input_kwargs" else argument
        if section not in ("input", "input_kwargs") or position not in positions.values():
            common[path] = value
        elif dot or value.is_tensor or value.value != parameters[int(position)].default:
            common[f"input.{position}{dot}{inside}"] = value
    return common


@functools.cache
def _parameters(prefix: str, api: str) -> tuple[inspect.Parameter, ...]:
    """Return the parameters of a function of torch, of which nothing runs; none where it is not written in Python.

    torch is imported by its name: only dumps of two tools need it.
    """
    try:
        torch = importlib.import_module("torch")
        names = vars({"Functional": torch.nn.functional, "Torch": torch, "Tensor": torch.Tensor}[prefix])
        parameters = _signature(names.get(api))
        if any(parameter.kind == inspect.Parameter.VAR_POSITIONAL for parameter in parameters):
            parameters = _signature(names.get(f"_{api}"))  # max_pool1d chooses between two functions
    except (KeyError, ImportError, ValueError, TypeError):
        return ()
    return parameters


def _signature(function: Any) -> tuple[inspect.Parameter, ...]:
    """Return the parameters of a function. Raises ValueError or TypeError where Python does not know them."""
    return tuple(inspect.signature(function).parameters.values())


# -- collectives -------------------------------------------------------------------------------------------------------

# Our entry of a collective has its inputs among the inputs. Other tools record the call's arguments, and the buffers
# that a collective writes to are among these: what was in them before does not matter.

_UNKNOWN = Operator("", "", "", "")
_TAG_INDEX = 3  # of send(tensor, dst, group, tag) and recv(tensor, src, group, tag)


@dataclass(frozen=True)
class CollectiveEntry:
    """A collective of one rank, with whom, and its tensors. Ranks are global ones.

    Attributes:
        operator: its row of the table of collectives; an empty one where the table has none.
        ranks: of the group; empty where the dump does not say.
        sequence: its number in its group (of a message: among those of its tag between these two); None where the dump
            does not say.
        peer, tag: of a message; peer is None where it has none, or the dump does not say.
        incomplete: it had not ended when the dump did, or it failed.
        inputs, outputs: its tensors that matter on this rank.
    """

    entry: DumpEntry
    api: str
    operator: Operator
    number: int
    ranks: tuple[int, ...]
    group: str
    sequence: int | None
    peer: int | None
    tag: int
    incomplete: bool
    inputs: tuple[tuple[str, DumpLeaf], ...]
    outputs: tuple[tuple[str, DumpLeaf], ...]

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def is_message(self) -> bool:
        return self.operator.is_message


def read_collective(entry: DumpEntry, me: int) -> CollectiveEntry:
    """Read a collective as rank ``me`` ran it."""
    arguments = {path: leaf for path, leaf in entry.values() if not leaf.is_tensor}
    group = next((leaf.raw for leaf in arguments.values() if leaf.type.endswith("ProcessGroup")), {})
    ranks = group.get("group_ranks")
    name = parse_name(entry.name)
    operator = operator_of(name.api) or _UNKNOWN
    role = next((role for role in ("src", "dst") if role in operator.parameter_names), "")
    rank = _integer(arguments, role, operator.parameter_names.index(role)) if role else None
    is_root = operator.is_message or rank in (None, me)
    inputs, outputs = _tensors(entry, operator)
    return CollectiveEntry(
        entry,
        name.api,
        operator,
        name.number or 0,
        tuple(rank for rank in ranks if isinstance(rank, int)) if isinstance(ranks, list) else (),
        str(group.get("group_id", "")),
        _integer(arguments, "seq"),
        rank if operator.is_message else None,
        _integer(arguments, "tag", _TAG_INDEX if operator.is_message else -1) or 0,
        entry.raw.get("incomplete") is True,
        tuple(inputs) if is_root or role != "src" else (),
        tuple(outputs) if is_root or role != "dst" else (),
    )


def _tensors(entry: DumpEntry, operator: Operator) -> tuple[list[tuple[str, DumpLeaf]], list[tuple[str, DumpLeaf]]]:
    """Return the collective's inputs and outputs. Another tool has all arguments among both."""
    inputs, outputs = entry.inputs, [] if operator.op == "send" else entry.outputs
    index = index_of_tensors(operator.parameters, "out")
    if index is None or any(leaf.nan_count is not None for _, leaf in (*inputs, *outputs)):  # only ours have counts
        return inputs, outputs
    buffers = (f"input.{index}", f"input_kwargs.{operator.parameter_names[index]}", f"output.{index}")
    written = [path for path, _ in (*inputs, *outputs) if ".".join(path.split(".")[:2]) in buffers]
    outputs = [item for item in outputs if item[0] in written] or outputs
    return [item for item in inputs if item[0] not in written], outputs


def _integer(arguments: Mapping[str, DumpLeaf], name: str, index: int = -1) -> int | None:
    """Return the value of an argument that is a whole number, given by its name or at its index."""
    leaf = arguments.get(f"input_kwargs.{name}") or arguments.get(f"input.{index}")
    return leaf.value if leaf is not None and type(leaf.value) is int else None


# -- comparisons -------------------------------------------------------------------------------------------------------

TOLERANCE = 0.5  # of a relative error; above it a tensor is a Warning
FAILED = ("Warning", "Different", "No", "N/A")  # verdicts; the others are Pass, Yes and nothing
GROWTH = "the error of Max grows, from below 0.01 in all inputs to above 0.1"

StatisticDifference = tuple[float | None, float | None]


def difference(a: float | None, b: float | None) -> StatisticDifference:
    """Return ``a - b``, and the error relative to b; None where a side has no number.

    The relative error is NaN where one side is NaN, and infinite where only one side is infinite, or b is 0.
    """
    if a is None or b is None:
        return None, None
    if a == b or (a != a and b != b):
        return 0.0, 0.0
    if a != a or b != b:
        return math.nan, math.nan
    if math.isinf(a) or math.isinf(b) or b == 0:
        return a - b, math.inf
    return a - b, abs((a - b) / b)


def error_grows(inputs: Sequence[float], output: float | None) -> bool:
    """Return whether an output is worth a look, by the relative errors of Max in it and in all inputs of its call."""
    return output is not None and output > 0.1 and bool(inputs) and max(inputs) < 0.01


def is_accurate(cosine: float, max_abs: float) -> bool:
    """Return the verdict on a saved tensor, of its cosine and largest difference; NaN is never accurate."""
    return cosine >= 0.9 and max_abs <= 1 and (cosine >= 0.99 or max_abs <= 0.001)


def columns(mode: str) -> list[str]:
    """Return the header of a comparison's CSV file; ``mode`` is "statistics", "md5" or "tensor"."""
    sides, numbers = ("NPU", "Bench"), statistic_keys("relative")
    labels = ["L2norm" if key == "Norm" else key for key in numbers]
    middle = {
        "statistics": [*(f"{label} diff" for label in labels), *(f"{key}RelativeErr" for key in numbers)],
        "md5": ["NPU MD5", "BENCH MD5"],
        "tensor": [
            *("Cosine", "EucDist", "MaxAbsErr", "MaxRelativeErr"),
            *("One Thousandth Err Ratio", "Five Thousandths Err Ratio"),
        ],
    }
    return [
        *(f"{side} {what}" for what in ("Name", "Dtype", "Tensor Shape", "Requires_grad") for side in sides),
        *middle[mode],
        *(f"{side} {label.lower()}" for side in sides for label in labels if mode != "md5"),
        *("Requires_grad Consistent", "Accurate or Not" if mode == "tensor" else "Result"),
        *("Err_message", "NPU_Stack_Info"),
    ]

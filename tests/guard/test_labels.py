"""A label is found by where the value came from in the program's text, and no code of the program runs for it.

Each case is a program's text and the labels that it gives. Most ways in which programs write a loop over named tensors
are in the corpus of `test_label_corpus`; here is what the corpus cannot show.
"""

from __future__ import annotations

import collections
import concurrent.futures
import enum
import functools
import gc
import heapq
import inspect
import itertools
import linecache
import logging
import sys
import textwrap
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpstats._observe.frames import calling_frame, site_of
from ddpstats.guard.labels import read
from ddpstats.guard.labels.read import Inferred, infer

T = torch.Tensor
Stats = dict[str, T]
Program = Callable[[Stats], Any]

_inferred: list[Inferred | None] = []
_file_numbers = itertools.count()


def reduce(tensor: T) -> T:
    """Infer the label in place of a collective."""
    _inferred.append(infer(sys._getframe(1)))
    return tensor


def infer_for(_: T) -> Inferred | None:
    return infer(sys._getframe(1))


def number() -> T:
    return torch.ones(1)


def labels_of(program: Program) -> list[str | None]:
    _inferred.clear()
    program({"a": number(), "b": number()})
    return [None if inferred is None else inferred.path for inferred in _inferred]


def evidence_for(program: Program) -> Any:
    labels_of(program)
    assert _inferred[0] is not None
    return _inferred[0].evidence


def program_of(body: str) -> Program:
    """Return a function of ``stats`` with this text, in its own file."""
    text = "def program(stats):\n" + textwrap.indent(textwrap.dedent(body), "    ")
    name = f"<program {next(_file_numbers)}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    names = {"reduce": reduce, "torch": torch, "__name__": "program"}
    modules = {module.__name__: module for module in (collections, functools, heapq)}
    namespace: dict[str, Any] = names | modules
    exec(compile(text, name, "exec"), namespace)
    program: Program = namespace["program"]
    return program


def items(stats: Stats) -> None:
    for _, value in stats.items():
        reduce(value)


# -- which key --------------------------------------------------------------------------------------------------------

LOOPS = [
    ("_, value in stats.items()", "value"),
    ("key in stats", "stats[key]"),
    ("key in list(stats)", "stats.get(key)"),
    ("_, (_, value) in enumerate(stats.items())", "value"),
    ("names, index in [(list(stats), 0), (list(stats), 1)]", "stats[names[index]]"),
    ("_, value in {'a': 1.0, 'b': 2.0}.items()", "torch.tensor(value)"),
    ("key in stats", "stats[key].float().mean() * 2 + 1"),
    ("key in stats", "collections.UserDict(stats)[key]"),
]


@pytest.mark.parametrize(("loop", "argument"), LOOPS)
def test_key_is_found_in_a_loop_and_again_from_the_cache(loop: str, argument: str) -> None:
    program = program_of(f"for {loop}:\n    reduce({argument})\n")
    assert labels_of(program) == ["a", "b"]
    assert labels_of(program) == ["a", "b"]


MADE_IN_STEPS = """
    for _, value in stats.items():
        value = value.float().mean()
        value /= 2
        reduce(value)
"""
IN_A_GENERATOR_EXPRESSION = """
    dict((key, reduce(value)) for key, value in stats.items())
"""
BEHIND_A_DECORATOR = """
    def logged(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return function(*args, **kwargs)
        return wrapper

    @logged
    @torch.no_grad()
    def reduce_value(value):
        return reduce(value.clone())

    for _, value in stats.items():
        reduce_value(value)
"""
FORMATTED_KEY = """
    table = {f"{key}_loss": value for key, value in stats.items()}
    for key in stats:
        reduce(table[f"{key}_loss"])
"""
NESTED = """
    tree = {"outer": {"inner": stats}}
    for part in tree.values():
        for inner in part.values():
            for key in inner:
                reduce(inner[key])
"""
NO_NAME = """
    for batch in [torch.ones(1), torch.ones(1)]:
        loss = (batch * 2).sum()
        reduce(loss)
"""
COMPUTED_FROM_A_NAMED_VALUE = """
    def forward(utterance):
        return {"ctc": torch.ones(1)}

    for utterance in ["utt1"]:
        losses = forward(utterance)
        for key in losses:
            reduce(losses[key])
"""


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        *((text, ["a", "b"]) for text in (MADE_IN_STEPS, IN_A_GENERATOR_EXPRESSION, BEHIND_A_DECORATOR)),
        *((FORMATTED_KEY, ["a_loss", "b_loss"]), (NESTED, ["outer/inner/a", "outer/inner/b"])),
        *((NO_NAME, [None, None]), (COMPUTED_FROM_A_NAMED_VALUE, ["ctc"])),
    ],
)
def test_label_is_the_path_of_keys_to_the_value(text: str, labels: list[str | None]) -> None:
    assert labels_of(program_of(text)) == labels


def test_label_of_an_enum_is_its_member_and_a_wrapper_is_no_part_of_a_parameters_name() -> None:
    class Loss(enum.Enum):
        CTC = 1
        ATT = "att"

    model = torch.nn.ModuleDict({"module": torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False))})

    def look(stats: Stats) -> None:
        for _, value in {Loss.CTC: number(), Loss.ATT: number()}.items():
            reduce(value)
        for _, parameter in model.named_parameters():
            reduce(parameter.data)

    assert labels_of(look) == ["Loss.CTC", "Loss.ATT", "0.weight"]


# -- evidence ---------------------------------------------------------------------------------------------------------

USE = """
    total, parts, results = 0.0, [], {}
    for key, value in stats.items():
        fresh = value.clone()
        %s
    %s
"""


@pytest.mark.parametrize(
    ("in_loop", "afterwards", "use"),
    [
        ("reduce(value)", "", "element"),
        ("reduce(value.div_(2))", "", "element"),
        ("reduce(value); total += value", "", "pooled element"),
        ("reduce(value); total = total + value * len(key)", "", "pooled element"),
        ("reduce(value); worst = value if key else 0; total = max(total, worst)", "", "pooled element"),
        ("reduce(value); total = value if total is None else total + value", "", "pooled element"),
        ("reduce(value); first = value; first = first + value", "", "pooled element"),
        ("reduce(value); first = value; first += value", "", "pooled element"),
        ("reduce(value); mean = value / 2; mean = mean * 2; results[key] = mean", "", "stored"),
        ("reduce(value)", "sum(stats.values())", "pooled element"),
        ("reduce(value)", "print(stats, sum(stats.values()))", "pooled element"),
        ("reduce(value)", "print(stats)", "element"),
        ("reduce(fresh)", "", ""),
        ("results[key] = fresh.item(); reduce(fresh)", "", ""),
        ("reduce(fresh); results[key] = fresh / 2", "", "stored"),
        ("reduce(fresh); results[key] = fresh", "sum(results.values())", "pooled"),
        ("reduce(fresh); results[key] = fresh; total += fresh", "", "pooled element"),
        ("reduce(fresh); print(f'{key}: {fresh.item()}')", "", ""),
        ("reduce(fresh); total += fresh", "", "pooled"),
        ("reduce(fresh); print(key, fresh); total += fresh.item()", "", "pooled"),
        ("reduce(fresh); parts.append((key, fresh))", "", "stored"),
        ("reduce(fresh); parts.append(fresh)", "", ""),
        ("reduce(fresh); parts.append(fresh)", "torch.stack(parts).sum()", "pooled"),
        ("reduce(fresh); parts.append(fresh)", "sum(parts) / len(parts)", "pooled"),
        ("reduce(fresh); parts.append(fresh)", "stack = len; stack(parts)", "pooled"),  # by the name alone
        ("reduce(fresh); parts.append(fresh)", "pile = torch.stack; pile(parts)", ""),
        ("meters = collections.Counter(); reduce(fresh); meters.update((key, fresh))", "", "stored"),
        ("reduce(fresh); parts.append(fresh)", "dict(zip(stats, parts))", ""),
        ("reduce(fresh); parts.append(value - fresh)", "", ""),
        ("pass", "parts = [(key, reduce(value.clone())) for key, value in stats.items()]", "stored"),
        ("pass", "for value in stats.values(): fresh = value + 0; reduce(fresh); parts.append(fresh - value)", ""),
        ("pass", "{key: reduce(value + 0) for key, value in stats.items()}", "stored"),
        ("pass", "handles = {key: reduce(value) for key, value in stats.items()}", "element"),
        ("pass", "sum(reduce(value.clone()) for value in stats.values())", "pooled"),
        ("reduce(value); parts.append(value)", "return parts", "pooled element"),
        ("reduce(value); parts.append(value)", "pile = len; pile(parts)", "pooled element"),
        ("reduce(value); parts.append(value)", "dict(zip(stats, parts))", "element"),
        ("parts.append(reduce(value))", "return parts", "element"),  # what waits for the result, of an in-place one
        ("reduce(value); results[key] = value", "for key in results: total += results[key]", "pooled element"),
        ("reduce(value); results[key] = value", "for key in results: total = total + results[key]", "pooled element"),
        ("reduce(value)", "for v, key in zip(stats.values(), stats): total += v.sum(dim=[0])", "pooled element"),
        ("reduce(value)", "for v in stats.values():\n        part = v * 2\n        total += part", "pooled element"),
        ("reduce(value)", "for key, v in stats.items(): v = v / 2; results[key] = v", "element"),
        ("text = ''; reduce(value)", "for key, v in stats.items(): text += '{}={}'.format(key, v)", "element"),
        ("text = ''; reduce(value)", "for key in stats: text = text + key + ' ' + str(stats[key])", "element"),
        (
            "text = ''; reduce(value); results[key] = value",
            "for key, v in results.items(): text += f'{key}={v} '",
            "stored",
        ),
    ],
)
def test_use_is_what_the_program_does_with_the_result(in_loop: str, afterwards: str, use: str) -> None:
    assert evidence_for(program_of(USE % (in_loop.replace("; ", "\n        "), afterwards))).use == use


@pytest.mark.parametrize(
    ("body", "set_by"),
    [
        ("for key in stats: reduce(stats[key])", "loop"),
        ("def helper(key): reduce(stats[key])\nhelper('a')", "text"),
        ("reduce(stats['a'])", "text"),
        ("key = min(stats)\nreduce(stats[key])", "text"),
        ("own = ['a', 'b'][0]\nreduce(torch.tensor({'a': 1.0}[own]))", "text"),
    ],
)
def test_evidence_says_what_chose_the_key(body: str, set_by: str) -> None:
    assert evidence_for(program_of(body)).set_by == set_by


@pytest.mark.parametrize(
    "argument",
    ["torch.zeros(1, device=obs['obs'].device)", "fresh.to(obs['obs'].dtype)", "fresh.to({'obs': 'cpu'}[key])"],
)
def test_tensor_that_has_only_its_device_from_an_element_does_not_bear_its_name(argument: str) -> None:
    body = f"obs = {{'obs': stats['a']}}\nfresh = torch.ones(1)\nfor key in obs:\n    reduce({argument})\n"
    assert labels_of(program_of(body)) == [None]


BY_A_MODEL = """
    class Model:
        def __init__(self, width):
            self.weight = torch.ones(width)

        def forward(self, x):
            return reduce((self.weight * x).sum())

    def work(device):
        model = Model({"width": 2}["width"])
        for x in [torch.ones(2)]:
            x = x.to(device, non_blocking=True)
            model.forward(x)

    work({"RANK": "cpu"}["RANK"])
"""


def test_what_a_model_computes_does_not_bear_the_name_of_its_rank_or_of_its_size() -> None:
    assert labels_of(program_of(BY_A_MODEL)) == [None]


METERS = """
    class Meter:
        def __init__(self, value):
            self.value = value

        def sync(self):
            reduce(self.value)

    class Meters:
        pass

    def by_name(meters):
        for name in ["loss", "acc"]:
            {call}.sync()

    meters = {make}
    by_name(meters)
"""


@pytest.mark.parametrize(
    ("call", "make"),
    [
        ("meters.get(name)", "{'loss': Meter(stats['a']), 'acc': Meter(stats['b'])}"),
        ("meters[name]", "{'loss': Meter(stats['a']), 'acc': Meter(stats['b'])}"),
        ("getattr(meters, name)", "Meters(); meters.loss = Meter(stats['a']); meters.acc = Meter(stats['b'])"),
    ],
)
def test_object_that_is_taken_by_its_name_bears_it(call: str, make: str) -> None:
    assert labels_of(program_of(METERS.format(call=call, make=make))) == ["loss", "acc"]


@pytest.mark.parametrize("converted", ["torch.Tensor.to(stats[key], 'cpu')", "to(stats[key], 'cpu')"])
def test_function_that_is_called_as_a_conversion_is_keeps_the_name(converted: str) -> None:
    body = f"to = torch.Tensor.to\nfor key in stats:\n    reduce({converted})\n"
    assert labels_of(program_of(body)) == ["a", "b"]


# -- nothing of the program runs, and nothing is kept alive -----------------------------------------------------------


class Hostile(dict[Any, Any]):
    """Every look that could run the program's code raises."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the program's code ran")

    __getitem__ = __contains__ = __len__ = __eq__ = get = items = values = __repr__ = __str__ = _refuse
    __getattribute__ = _refuse


class HostileKey:
    def __repr__(self) -> str:
        raise AssertionError("the program's code ran")

    __str__ = __eq__ = __hash__ = __repr__  # type: ignore[assignment]


def test_no_code_of_the_programs_classes_runs() -> None:
    hostile = Hostile()
    dict.__setitem__(hostile, "a", number())

    def look(stats: Stats) -> None:
        for value in dict.values(hostile):
            same, key = hostile, HostileKey()
            assert key is not None
            assert same is not None
            reduce(value)

    assert labels_of(look) == [None]


class HostileMeta(type):
    """A look at a class can run code, too."""

    armed = False

    def _refuse(cls) -> None:
        if HostileMeta.armed:
            raise AssertionError("the program's code ran")

    def __getattribute__(cls, name: str) -> Any:
        HostileMeta._refuse(cls)
        return type.__getattribute__(cls, name)

    def __eq__(cls, other: object) -> bool:
        HostileMeta._refuse(cls)
        return cls is other

    def __hash__(cls) -> int:
        HostileMeta._refuse(cls)
        return id(cls)


class OfHostileClass(metaclass=HostileMeta):
    pass


def test_no_code_of_a_metaclass_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    holder, key = OfHostileClass(), OfHostileClass()
    holder.stats = {key: number(), "a": number()}  # type: ignore[attr-defined]

    def look(stats: Stats) -> None:
        monkeypatch.setattr(HostileMeta, "armed", True)
        for _, value in holder.stats.items():  # type: ignore[attr-defined]
            reduce(value)
        for value in [holder, key]:
            reduce(value)  # type: ignore[arg-type]
        monkeypatch.setattr(HostileMeta, "armed", False)

    assert labels_of(look) == [None, "a", None, None]


class OwnMapping(dict[str, Any]):
    """A mapping that `exec` takes as the variables of code."""

    asked = 0

    def _ask(self, *args: Any) -> Any:
        self.asked += 1
        raise AssertionError("the program's code ran")

    get = __contains__ = keys = values = items = __len__ = _ask


@pytest.mark.parametrize("kind", ["globals", "locals"])
def test_variables_in_a_mapping_of_the_programs_are_not_asked(kind: str) -> None:
    text, name = "for key in stats: reduce(stats[key])\n", f"<cell of {kind}>"
    linecache.cache[name] = (len(text), None, [text], name)
    plain = {"reduce": reduce, "stats": {"a": number()}, "__name__": "cell"}
    own = OwnMapping(plain)
    exec(compile(text, name, "exec"), *([own] if kind == "globals" else [plain, own]))
    assert not own.asked


class WithProperty:
    def __init__(self, held: Any) -> None:
        self.held, self.looks = held, 0

    @property
    def stats(self) -> Any:
        self.looks += 1
        return self.held


def test_property_is_not_asked_and_iterator_is_not_advanced() -> None:
    owner = WithProperty({"a": number(), "b": number()})

    def pairs() -> Iterator[tuple[str, T]]:
        yield from owner.held.items()

    def look(stats: Stats) -> None:
        for key in list(owner.stats):
            value = owner.stats[key]
            looks = owner.looks
            reduce(value)
            assert owner.looks == looks
        source = pairs()
        for _, value in source:
            reduce(value)

    assert labels_of(look) == ["a", "b"] * 2


def test_tensor_is_not_kept_alive() -> None:
    def step() -> None:
        stats = {"a": torch.ones(1)}
        for tensor in stats.values():
            reduce(tensor)
        alive = weakref.ref(tensor)
        del tensor, stats
        gc.collect()
        assert alive() is None

    _inferred.clear()
    step()


def test_local_variables_stay_as_they_are_where_the_program_asks_for_them() -> None:
    for tensor in {"a": number()}.values():
        variables = locals()
        before = dict(variables)
        reduce(tensor)
        assert variables.keys() == before.keys()


def test_local_variables_stay_as_they_are_where_the_frame_is_held() -> None:
    stats, held = {"loss": torch.zeros(1)}, sys._getframe().f_locals
    assert "stats" not in held
    _inferred.clear()
    for key in stats:
        reduce(stats[key])
    assert _inferred[0] is not None
    assert held["stats"] is stats


EDITED = "\n\ndef other(stats):\n    for key in stats: print(stats[key])\n"


@pytest.mark.parametrize("text", [None, EDITED], ids=["no text", "edited text"])
def test_there_is_no_label_where_the_text_is_not_the_codes(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "edited.py"
    if text is not None:
        path.write_text(text)
    namespace: dict[str, Any] = {"reduce": reduce, "__name__": "edited"}
    exec(compile("\n\ndef look(stats):\n    for key in stats: reduce(stats[key])\n", str(path), "exec"), namespace)
    assert labels_of(namespace["look"]) == [None, None]


# -- what is kept from one call to the next ---------------------------------------------------------------------------


def test_call_site_is_right_with_another_container_each_time() -> None:
    """Keys, their order, the container's class, and tensors with two names differ from what was kept."""
    tied = number()
    tables: list[Any] = [
        *({"a": number(), "b": number()}, {"b": number(), "a": number()}, {"x": number(), "b": number()}),
        *({"a": number()}, {"a": number()}, collections.OrderedDict(a=number(), b=number()), {"a": tied, "b": tied}),
        *({"a": number(), "b": number()}, {"a": number(), "b": number(), "c": number()}, {1: number()}),
    ]

    def changing(stats: Stats) -> None:
        for table in tables * 2:
            items(table)

    expected = [(key if type(key) is str else f"[{key}]", table) for table in tables * 2 for key in table]
    assert labels_of(changing) == [label for label, _ in expected]
    for inferred, (_, table) in zip(_inferred, expected, strict=True):
        assert inferred is not None
        (level,) = inferred.levels
        assert level.names == tuple(key if type(key) is str else f"[{key}]" for key in table)
        assert level.source == type(table).__name__
        assert bool(level.aliases) == (table is tables[6])


def test_call_site_is_right_when_reached_with_and_without_a_key_of_the_caller() -> None:
    def alternately(stats: Stats) -> None:
        splits = {"train": stats, "valid": stats}
        for _ in range(2):
            items(stats)
            for split in splits:
                items(splits[split])

    assert labels_of(alternately) == ["a", "b", "train/a", "train/b", "valid/a", "valid/b"] * 2


def test_call_site_is_right_in_several_threads() -> None:
    wrong: list[Any] = []

    def walk(stats: Stats) -> None:
        for key, value in stats.items():
            inferred = infer_for(value)
            if inferred is None or inferred.path != key or inferred.levels[0].names != tuple(stats):
                wrong.append((key, inferred))

    def walks(name: str) -> None:
        stats = {f"{name}{index}": number() for index in range(7)}
        for _ in range(200):
            walk(stats)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            list(pool.map(walks, ("left", "right", "middle")))
    finally:
        sys.setswitchinterval(before)
    assert not wrong


def test_memory_for_ever_new_names_is_bounded() -> None:
    for index in range(5000):
        items({f"utt{index}-{part}": number() for part in ("ctc", "att")})
    assert len(read._labels) <= 4096
    assert sum(len(siblings.names) for siblings in read._kept_siblings.values()) <= 1 << 16


# -- programs of unusual size -----------------------------------------------------------------------------------------


def test_look_does_not_fail_where_the_stack_is_nearly_used_up(caplog: pytest.LogCaptureFixture) -> None:
    """This holds at any depth, also where the look's failures are logged; and a later look is right."""
    caplog.set_level(logging.DEBUG, "ddpstats")
    program = program_of("for key in stats: reduce(stats[key])\n")
    used = len(inspect.stack(0))
    for left in range(12, 60):  # frames that are left when the collective is called
        _at_depth(sys.getrecursionlimit() - used - left, program)
    assert labels_of(program) == ["a", "b"]


def _at_depth(depth: int, program: Program) -> None:
    if depth > 0:
        _at_depth(depth - 1, program)
    else:
        program({"a": torch.empty(0)})


# -- call sites -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wing", ["guard", "dump.record.calls", "capture", "sentinel"])
def test_site_is_no_line_of_a_wing_that_watches_the_program(wing: str) -> None:
    between: dict[str, Any] = {"__name__": f"ddpstats.{wing}", "calling_frame": calling_frame}
    exec("def call(): return calling_frame(1)", between)
    frame, by_torch, *_ = between["call"]()
    assert "test_labels.py" in str(site_of(frame))
    assert not by_torch


# -- chains ------------------------------------------------------------------------------------------------------------


def test_a_caller_that_gives_no_further_name_makes_no_other_label() -> None:
    def train(stats: Stats) -> None:
        items(stats)

    def program(stats: Stats) -> None:
        items(stats)
        train(stats)

    assert labels_of(program) == ["a", "b"] * 2
    assert _inferred[:2] == _inferred[2:]


def test_chains_of_ever_other_callers_are_not_kept() -> None:
    def walk(tensor: T, turns: int, depth: int) -> None:
        if depth == 0:
            reduce(tensor)
        elif turns & 1:
            walk(tensor, turns >> 1, depth - 1)
        else:
            walk(tensor, turns >> 1, depth - 1)

    def program(stats: Stats) -> None:
        for turns in range(0, 1 << 16, 97):
            for tensor in stats.values():
                walk(tensor, turns, 16)

    assert set(labels_of(program)) == {"a", "b"}
    assert len(read._chains) <= read._MAX_KEPT


def test_a_dict_with_another_key_of_the_same_tensor_is_read_again() -> None:
    first, second = torch.ones(1), torch.ones(1)
    stats, last = {"a": first, "_": second}, read.LastContainer()
    assert last.siblings("a", stats).names == ("a",)
    del stats["_"]
    stats["b"] = first
    assert last.siblings("a", stats).aliases.keys() == {"a", "b"}

"""Labels: found by where the value came from in the text, however that is written; no code of the program's runs."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import enum
import functools
import gc
import heapq
import inspect
import linecache
import logging
import sys
import time
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpstats._observe.user_frames import calling_frame, site_of
from ddpstats.guard.labels import _infer, _siblings
from ddpstats.guard.labels._evidence import evidence_of
from ddpstats.guard.labels._infer import Inferred, infer
from ddpstats.guard.labels._reading import is_readable
from ddpstats.guard.labels._spelled import spells

T = torch.Tensor
Stats = dict[str, T]

_found: list[Inferred | None] = []


def reduce(tensor: T) -> T:
    """Stands for a collective: what its caller is doing is looked at."""
    _found.append(infer(tensor, sys._getframe(1)))
    return tensor


def one() -> T:
    return torch.ones(1)


# -- the ways in which programs write it -------------------------------------------------------------------------------


def items(stats: Stats) -> None:
    for _, value in stats.items():
        reduce(value)


def keys(stats: Stats) -> None:
    for key in stats:
        reduce(stats[key])


def by_get(stats: Stats) -> None:
    for key in list(stats):
        reduce(stats.get(key))  # type: ignore[arg-type]


def values(stats: Stats) -> None:
    for value in stats.values():
        reduce(value)


def comprehension(stats: Stats) -> dict[str, T]:
    return {key: reduce(value) for key, value in stats.items()}


def list_comprehension(stats: Stats) -> list[T]:
    return [reduce(value) for value in stats.values()]


def generator(stats: Stats) -> None:
    dict((key, reduce(value)) for key, value in stats.items())  # noqa: C402


def in_order_of_names(stats: Stats) -> None:
    for _, value in sorted(stats.items()):
        reduce(value)


def numbered(stats: Stats) -> None:
    for _, (_, value) in enumerate(stats.items()):
        reduce(value)


def zipped(stats: Stats) -> None:
    for _, value in zip(["a", "b"], list(stats.values()), strict=True):
        reduce(value)


def by_index_of_names(stats: Stats) -> None:
    names = list(stats)
    for i in range(len(names)):
        reduce(stats[names[i]])


def made_of_it(stats: Stats) -> None:
    for _, value in stats.items():
        fresh = value.clone()
        reduce(fresh)


def made_in_steps(stats: Stats) -> None:
    for _, value in stats.items():
        value = value.float().mean()
        value /= 2
        reduce(value)


def made_of_a_number(stats: Stats) -> None:
    for _, number in {"a": 1.0, "b": 2.0}.items():
        reduce(torch.tensor(number))


def made_by_arithmetic(stats: Stats) -> None:
    for key in stats:
        reduce(stats[key] * 2 + 1)


class Trainer:
    def __init__(self, stats: Stats) -> None:
        self.stats = stats

    def by_key(self) -> None:
        for key in self.stats:
            reduce(self.stats[key])

    def through_a_method(self) -> None:
        for _, value in self.stats.items():
            self._reduce_one(value)

    def _reduce_one(self, value: T) -> None:
        fresh = value.detach().clone()
        reduce(fresh)


def attribute(stats: Stats) -> None:
    Trainer(stats).by_key()


def method(stats: Stats) -> None:
    Trainer(stats).through_a_method()


def helper(stats: Stats) -> None:
    def reduce_one(value: T) -> T:
        fresh = value.clone()
        return reduce(fresh)

    for value in stats.values():
        reduce_one(value)


def helper_two_deep(stats: Stats) -> None:
    def inner(*, tensor: T) -> T:
        return reduce(tensor / 2)

    def outer(value: T) -> T:
        return inner(tensor=value)

    for _, value in stats.items():
        outer(value)


def decorated(stats: Stats) -> None:
    def logged(function: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> T:
            return function(*args, **kwargs)

        return wrapper

    @logged
    def reduce_one(value: T) -> T:
        return reduce(value.clone())

    for _, value in stats.items():
        reduce_one(value)


def partially_applied(stats: Stats) -> None:
    def scaled(factor: int, value: T) -> T:
        return reduce(value)

    reduce_one = functools.partial(scaled, 2)
    for _, value in stats.items():
        reduce_one(value)


def mapped(stats: Stats) -> None:
    def reduce_one(value: T) -> T:
        return reduce(value)

    list(map(reduce_one, stats.values()))


def mapped_pairs(stats: Stats) -> None:
    list(map(lambda pair: reduce(pair[1]), stats.items()))  # noqa: C417


def closure(stats: Stats) -> None:
    def go() -> None:
        for key in stats:
            reduce(stats[key])

    go()


def queue(stats: Stats) -> None:
    waiting = collections.deque(stats.items())
    while waiting:
        _, value = waiting.popleft()
        reduce(value)


def returned(stats: Stats) -> None:
    def forward() -> Stats:
        return stats

    for _, value in forward().items():
        reduce(value)


def stored_under_the_name(stats: Stats) -> None:
    results = {}
    for key in stats:
        total = torch.zeros(4)
        mean = total.mean()
        reduce(mean)
        results[key] = mean / 2


class SubDict(dict[str, T]):
    pass


class UserDict(collections.UserDict[str, T]):
    pass


def subclass(stats: Stats) -> None:
    mine = SubDict(stats)
    for key in mine:
        reduce(mine[key])


def user_dict(stats: Stats) -> None:
    mine = UserDict(stats)
    for key in mine:
        reduce(mine[key])


@dataclasses.dataclass
class Losses:
    a: T
    b: T


def fields(stats: Stats) -> None:
    losses = Losses(**stats)
    for field in dataclasses.fields(losses):
        reduce(getattr(losses, field.name))


def namespace(stats: Stats) -> None:
    for _, value in vars(types.SimpleNamespace(**stats)).items():
        reduce(value)


class Meter:
    def __init__(self, value: T) -> None:
        self.total = value

    def synchronize(self) -> None:
        total = torch.stack([self.total, self.total])
        reduce(total)


def meters(stats: Stats) -> None:
    each = {key: Meter(value) for key, value in stats.items()}
    for meter in each.values():
        meter.synchronize()


def recursion(stats: Stats) -> None:
    _recursive_sum(stats)


def _recursive_sum(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _recursive_sum(inner) for key, inner in value.items()}
    value = (value * 2).sum()
    return reduce(value)


def under_no_grad(stats: Stats) -> None:
    @torch.no_grad()
    def reduce_one(value: T) -> T:
        return reduce(value)

    for _, value in stats.items():
        reduce_one(value)


def formatted_key(stats: Stats) -> None:
    table = {f"{key}_loss": value for key, value in stats.items()}
    for key in stats:
        reduce(table[f"{key}_loss"])


_PLAIN = (
    items, keys, by_get, values, comprehension, list_comprehension, generator, in_order_of_names, numbered, zipped,
    by_index_of_names, made_of_it, made_in_steps, made_of_a_number, made_by_arithmetic, attribute, method, helper,
    helper_two_deep, decorated, partially_applied, mapped, mapped_pairs, closure, queue, returned,
    stored_under_the_name, subclass, user_dict, fields, namespace, meters, recursion, under_no_grad,
)  # fmt: skip


def labels_of(program: Callable[[Stats], Any]) -> list[str | None]:
    _found.clear()
    program({"a": one(), "b": one()})
    return [None if found is None else found.path for found in _found]


@pytest.mark.parametrize("program", _PLAIN, ids=lambda program: program.__name__)
def test_the_key_is_found(program: Callable[[Stats], Any]) -> None:
    assert labels_of(program) == ["a", "b"]
    assert labels_of(program) == ["a", "b"], "a second time, from what was kept"


def test_a_formatted_key_is_spelled_out() -> None:
    assert labels_of(formatted_key) == ["a_loss", "b_loss"]


def test_nested_containers_give_a_path() -> None:
    def nested(stats: Stats) -> None:
        tree = {"outer": {"inner": stats}}
        for part in tree.values():
            for inner in part.values():
                for key in inner:
                    reduce(inner[key])

    assert labels_of(nested) == ["outer/inner/a", "outer/inner/b"]


def test_an_enum_gives_its_members_name() -> None:
    class Loss(enum.Enum):
        CTC = 1
        ATT = "att"

    def by_enum(stats: Stats) -> None:
        for _, value in {Loss.CTC: one(), Loss.ATT: one()}.items():
            reduce(value)

    assert labels_of(by_enum) == ["Loss.CTC", "Loss.ATT"]


def test_what_wraps_a_model_is_no_part_of_a_parameters_name() -> None:
    model = torch.nn.ModuleDict({"module": torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False))})

    def parameters(stats: Stats) -> None:
        for _, parameter in model.named_parameters():
            reduce(parameter.data)

    assert labels_of(parameters) == ["0.weight"]


def test_where_the_text_has_no_name_there_is_no_label() -> None:
    def plain(stats: Stats) -> None:
        loss = torch.zeros(())
        for batch in [one(), one()]:
            loss = (batch * 2).sum()
            reduce(loss)

    assert labels_of(plain) == [None, None]


def test_what_an_utterance_was_made_into_does_not_bear_its_name() -> None:
    """A container is followed through other names for it, not through what computed it."""

    def losses_of(stats: Stats) -> None:
        for utterance in ["utt1"]:
            losses = forward(utterance)
            for key in losses:
                reduce(losses[key])

    def forward(utterance: str) -> Stats:
        return {"ctc": one()}

    assert labels_of(losses_of) == ["ctc"]


# -- what is known besides ---------------------------------------------------------------------------------------------


def _evidence(program: Callable[[Stats], Any]) -> Any:
    labels_of(program)
    assert _found[0] is not None
    return evidence_of(_found[0])


@pytest.mark.parametrize(
    ("program", "fate"),
    [(items, "in place"), (keys, "in place"), (comprehension, "keyed"), (made_of_it, "unused"), (meters, "unused"),
     (stored_under_the_name, "keyed"), (recursion, "keyed")],
    ids=lambda value: getattr(value, "__name__", value),
)  # fmt: skip
def test_fate(program: Callable[[Stats], Any], fate: str) -> None:
    assert _evidence(program).fate == fate


def test_fates_of_results_that_are_used() -> None:
    def pooled(stats: Stats) -> None:
        total = torch.zeros(1)
        for _, value in stats.items():
            fresh = value.clone()
            reduce(fresh)
            total += fresh

    def kept(stats: Stats) -> None:
        results = []
        for _, value in stats.items():
            fresh = value.clone()
            reduce(fresh)
            results.append(fresh)

    def logged(stats: Stats) -> None:
        for key, value in stats.items():
            fresh = value.clone()
            reduce(fresh)
            print(f"{key}: {fresh.item()}", file=sys.stderr)

    def summed(stats: Stats) -> None:
        sum(reduce(value.clone()) for value in stats.values())

    assert [_evidence(program).fate for program in (pooled, kept, logged, summed)] == [
        *("pooled", "kept", "keyed", "pooled")
    ]


def _printed_and_pooled(stats: Stats) -> None:
    total = 0.0
    for key, value in stats.items():
        fresh = value.clone()
        reduce(fresh)
        print(key, fresh, file=sys.stderr)
        total += fresh.item()


def _kept_and_added_up(stats: Stats) -> None:
    parts = []
    for key in stats:
        fresh = stats[key].clone()
        reduce(fresh)
        parts.append(fresh)
    stacked = torch.stack(parts)
    stacked.sum()


def _kept_and_put_beside_the_names(stats: Stats) -> None:
    parts = []
    for key in stats:
        fresh = stats[key].clone()
        reduce(fresh)
        parts.append(fresh)
    dict(zip(stats, parts, strict=True))


def _own_value_stored_before(stats: Stats) -> None:
    own = {}
    for key, value in stats.items():
        fresh = value.clone()
        own[key] = fresh.item()
        reduce(fresh)


def _the_tensor_stored_before(stats: Stats) -> None:
    results = {}
    for key, value in stats.items():
        fresh = value.clone()
        results[key] = fresh
        reduce(fresh)


def _is_bad(value: T) -> bool:
    bad = (~torch.isfinite(value)).float()
    reduce(bad)
    return bool(bad)


def _voted(stats: Stats) -> None:
    scale = 2
    for _, value in stats.items():
        if _is_bad(value):
            scale = 1
    assert scale == 2


def _in_place_method(stats: Stats) -> None:
    for value in stats.values():
        reduce(value.div_(2))


@pytest.mark.parametrize(
    ("program", "fate"),
    [
        (_printed_and_pooled, "pooled"),
        (_kept_and_added_up, "pooled"),
        (_kept_and_put_beside_the_names, "keyed"),
        (_own_value_stored_before, "unused"),
        (_the_tensor_stored_before, "keyed"),
        (_voted, "pooled"),
        (_in_place_method, "in place"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_fates_that_take_a_second_look(program: Callable[[Stats], Any], fate: str) -> None:
    assert _evidence(program).fate == fate


def _sorted_in_steps(stats: Stats) -> None:
    worst = sorted(stats.items(), key=lambda item: -item[1])
    worst = list(worst)[:3]
    for _, (_, value) in enumerate(reversed(worst)):
        reduce(value)


def _sorted_into_a_dict(stats: Stats) -> None:
    best = {name: value.clone() for name, value in sorted(stats.items(), key=lambda item: item[1])}
    for _, value in dict(best).items():
        reduce(value)


def _sorted_into_columns(stats: Stats) -> None:
    names, values = zip(*heapq.nlargest(2, stats.items()), strict=True)
    for _, value in zip(names, values, strict=True):
        reduce(value)


def _most_common(stats: Stats) -> None:
    for name, _ in collections.Counter(stats).most_common():
        reduce(stats[name])


def _sorted_and_numbered(stats: Stats) -> None:
    names = sorted(stats)
    for place in range(len(names)):
        reduce(stats[names[place]])


def _sorted_filtered(stats: Stats) -> None:
    for name in filter(None, sorted(stats)):
        reduce(stats[name])


def _each_is_sorted(stats: Stats) -> None:
    smallest = {name: sorted(value)[0] for name, value in stats.items()}
    for _, value in smallest.items():
        reduce(value)


def _each_is_sorted_in_the_loop(stats: Stats) -> None:
    losses = [reduce(stats[name]) for name in stats for _ in sorted(stats[name])]
    assert losses


def _sorted_beside(stats: Stats) -> None:
    numbers = sorted([2, 1])
    for name, _ in zip(stats, numbers, strict=True):
        reduce(stats[name])


def _sorted_and_made_a_set(stats: Stats) -> None:
    for name in set(sorted(stats)):  # noqa: C414
        reduce(stats[name])


@pytest.mark.parametrize(
    ("program", "chosen_by"),
    [(in_order_of_names, "sorted"), (_sorted_in_steps, "sorted"), (_sorted_into_a_dict, "sorted"),
     (_sorted_into_columns, "sorted"), (_most_common, "sorted"), (_sorted_and_numbered, "sorted"),
     (_sorted_filtered, "sorted"), (_each_is_sorted, "loop"), (_each_is_sorted_in_the_loop, "loop"),
     (_sorted_beside, "loop"), (_sorted_and_made_a_set, "loop")],
    ids=lambda value: getattr(value, "__name__", value),
)  # fmt: skip
def test_sorted_is_a_loop_whose_own_order_was_sorted(program: Callable[[Stats], Any], chosen_by: str) -> None:
    assert _evidence(program).chosen_by == chosen_by


def test_siblings_are_those_of_the_container_now() -> None:
    """Of one that grew or was made anew, too, also where it is the same object in memory."""

    def changing(stats: Stats) -> None:
        for turn in range(3):
            stats[f"new{turn}"] = one()
            items(stats)

    labels_of(changing)
    sizes = [len(found.levels[0].names) for found in _found if found is not None]
    assert sizes == [3] * 3 + [4] * 4 + [5] * 5


def test_names_that_the_text_has() -> None:
    def spelled(stats: Stats) -> None:
        for name in ("snr_loss", "train/acc", "".join(["q", "x", "z"])):
            table = {name: one()}
            for value in table.values():
                reduce(value)

    labels_of(spelled)
    assert [evidence_of(found).spelled for found in _found if found is not None] == ["whole", "whole", ""]


# -- nothing of the program runs, and nothing stays --------------------------------------------------------------------


class Hostile(dict[Any, Any]):
    """Every way in which a look could run the program's code raises."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the program's code ran")

    __getitem__ = __contains__ = __len__ = __eq__ = get = items = values = __repr__ = __str__ = _refuse
    __getattribute__ = _refuse


class HostileKey:
    def __repr__(self) -> str:
        raise AssertionError("the program's code ran")

    __str__ = __eq__ = __hash__ = __repr__  # type: ignore[assignment]


class WithProperty:
    def __init__(self, held: Any) -> None:
        self.held = held

    @property
    def stats(self) -> Any:
        self.looked = True
        return self.held


def test_no_code_of_the_programs_classes_runs() -> None:
    hostile = Hostile()
    dict.__setitem__(hostile, "a", one())

    def look(stats: Stats) -> None:
        for value in dict.values(hostile):
            mine = hostile
            key = HostileKey()
            assert key is not None
            assert mine is not None
            reduce(value)

    assert labels_of(look) == [None] or labels_of(look) == ["a"]


class HostileMeta(type):
    """Looking at a class can run code as well."""

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
    holder.stats = {key: one(), "a": one()}  # type: ignore[attr-defined]

    def look(stats: Stats) -> None:
        monkeypatch.setattr(HostileMeta, "armed", True)
        for _, value in holder.stats.items():  # type: ignore[attr-defined]
            reduce(value)
        for value in [holder, key]:
            reduce(value)  # type: ignore[arg-type]
        monkeypatch.setattr(HostileMeta, "armed", False)

    assert labels_of(look) == [None, "a", None, None]


class OwnMapping(dict[str, Any]):
    """Given to `exec` as the variables of code."""

    asked = 0

    def _ask(self, *args: Any) -> Any:
        self.asked += 1
        raise AssertionError("the program's code ran")

    get = __contains__ = keys = values = items = _ask


@pytest.mark.parametrize("place", ["globals", "locals"])
def test_variables_in_a_mapping_of_the_programs_are_not_asked(place: str) -> None:
    text, name = "for key in stats: reduce(stats[key])\n", f"<cell of {place}>"
    linecache.cache[name] = (len(text), None, [text], name)
    given = {"reduce": reduce, "stats": {"a": one()}, "__name__": "cell"}
    own = OwnMapping(given)
    if place == "globals":
        exec(compile(text, name, "exec"), own)
    else:
        exec(compile(text, name, "exec"), given, own)
    assert not own.asked


class OwnLength(dict[str, Any]):
    def __len__(self) -> int:
        raise AssertionError("the program's code ran")


def test_a_dict_is_not_asked_for_its_length() -> None:
    stats = OwnLength(a=one(), b=one())
    assert labels_of(lambda _: [reduce(value) for value in stats.values()]) == ["a", "b"]


def test_a_property_is_not_asked() -> None:
    owner = WithProperty({"a": one(), "b": one()})

    def look(stats: Stats) -> None:
        for key in list(owner.stats):
            value = owner.stats[key]
            del owner.looked
            reduce(value)
            assert not hasattr(owner, "looked")

    assert labels_of(look) == ["a", "b"]


def test_an_iterator_is_not_advanced() -> None:
    def pairs() -> Iterator[tuple[str, T]]:
        yield from {"a": one(), "b": one()}.items()

    def look(stats: Stats) -> None:
        source = pairs()
        for _, value in source:
            reduce(value)

    assert labels_of(look) == ["a", "b"]


def test_looking_keeps_nothing_alive() -> None:
    def step() -> None:
        stats = {"a": torch.ones(1)}
        for tensor in stats.values():
            reduce(tensor)
        alive = weakref.ref(tensor)
        del tensor, stats
        gc.collect()
        assert alive() is None, "a tensor is kept alive by having been looked at"

    _found.clear()
    step()


def test_a_function_that_uses_locals_is_left_alone() -> None:
    for tensor in {"a": one()}.values():
        mine = locals()
        before = dict(mine)
        reduce(tensor)
        assert mine.keys() == before.keys()


def look_while_somebody_holds_the_variables() -> tuple[Inferred | None, bool]:
    stats, frame, found = {"loss": torch.zeros(1)}, sys._getframe(), None
    held = frame.f_locals
    for key in stats:
        found = infer(stats[key], frame)
    return found, held["stats"] is stats


def test_variables_that_somebody_holds_stay_as_they_are() -> None:
    found, stayed = look_while_somebody_holds_the_variables()
    assert found is not None
    assert stayed


def test_without_source_a_label_is_only_doubted() -> None:
    program = "def look(stats):\n    for key in stats:\n        reduce(stats[key])\n"
    namespace: dict[str, Any] = {"reduce": reduce, "__name__": "nowhere"}
    exec(program, namespace)
    assert labels_of(namespace["look"]) == ["a", "b"]
    assert _found[0] is not None
    assert evidence_of(_found[0]).is_beside


def test_text_that_is_not_the_codes_is_not_believed(tmp_path: Any) -> None:
    """A file that was changed after it was imported."""
    path = tmp_path / "edited.py"
    path.write_text("\n\ndef other(stats):\n    for key in stats: print(stats[key])\n")
    code = compile("\n\ndef look(stats):\n    for key in stats: reduce(stats[key])\n", str(path), "exec")
    namespace: dict[str, Any] = {"reduce": reduce, "__name__": "edited"}
    exec(code, namespace)
    assert labels_of(namespace["look"]) in (["a", "b"], [None, None])
    assert all(found is None or found.beside for found in _found)


# -- what is kept from one call to the next ----------------------------------------------------------------------------


def test_calls_that_are_alike_share_one_label() -> None:
    def twice(stats: Stats) -> None:
        for _ in range(2):
            keys(stats)

    assert labels_of(twice) == ["a", "b"] * 2
    assert _found[0] is _found[2]
    assert _found[1] is _found[3]


def test_one_place_with_another_container_each_time() -> None:
    """Whatever was kept of the one before: its keys, their order, its class, tensors with two names."""
    tied = one()
    tables: list[Any] = [
        *({"a": one(), "b": one()}, {"b": one(), "a": one()}, {"x": one(), "b": one()}, {"a": one()}, {"a": one()}),
        *(collections.OrderedDict(a=one(), b=one()), {"a": tied, "b": tied}, {"a": one(), "b": one()}, {1: one()}),
    ]

    def changing(stats: Stats) -> None:
        for table in tables * 2:
            items(table)

    expected = [(key if type(key) is str else f"[{key}]", table) for table in tables * 2 for key in table]
    assert labels_of(changing) == [label for label, _ in expected]
    for found, (_, table) in zip(_found, expected, strict=True):
        assert found is not None
        (beside,) = found.levels
        assert beside.names == tuple(key if type(key) is str else f"[{key}]" for key in table)
        assert beside.source == type(table).__name__
        assert bool(beside.aliases) == (table is tables[6])


def test_one_place_called_from_others() -> None:
    """The same instruction and the same dict, reached under a key of the caller's, and without one."""

    def alternately(stats: Stats) -> None:
        splits = {"train": stats, "valid": stats}
        for _ in range(2):
            items(stats)
            for split in splits:
                items(splits[split])

    assert labels_of(alternately) == ["a", "b", "train/a", "train/b", "valid/a", "valid/b"] * 2


def test_one_place_in_several_threads() -> None:
    wrong: list[Any] = []

    def walk(stats: Stats) -> None:
        for key, value in stats.items():
            found = infer(value, sys._getframe())
            if found is None or found.path != key or found.levels[0].names != tuple(stats):
                wrong.append((key, found))

    def walks(name: str) -> None:
        stats = {f"{name}{number}": one() for number in range(7)}
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


def test_what_is_kept_of_ever_new_names_is_bounded() -> None:
    for number in range(5000):
        items({f"utt{number}-{part}": one() for part in ("ctc", "att")})
    assert len(_infer._labels) <= 4096
    assert sum(len(siblings.names) for siblings in _siblings._kept.values()) <= 1 << 16


def test_a_name_is_spelled_once_the_module_that_has_it_is_there(tmp_path: Path, monkeypatch: Any) -> None:
    files = frozenset({str(tmp_path / "train.py"), __file__})
    name = "".join(["qx", "zwvj"])
    assert spells(name, files) == spells(name, files) == ""
    (tmp_path / "more.py").write_text(f"NAME = {name!r}\n")
    module = types.ModuleType("more")
    module.__file__ = str(tmp_path / "more.py")
    monkeypatch.setitem(sys.modules, "more", module)
    assert spells(name, files) == "whole"


# -- programs of unusual size -----------------------------------------------------------------------------------------


def _made(name: str, text: str) -> Callable[[Stats], Any]:
    """A function ``program`` of its own file."""
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {"reduce": reduce, "__name__": "made"}
    exec(compile(text, name, "exec"), namespace)
    made: Callable[[Stats], Any] = namespace["program"]
    return made


def test_a_stack_that_is_nearly_used_up_is_no_reason_to_fail(caplog: pytest.LogCaptureFixture) -> None:
    """At whatever depth the look begins, also where its failures are logged; and a later look is not spoilt."""
    caplog.set_level(logging.DEBUG, "ddpstats")
    program = _made("<deep>", "def program(stats):\n    for key in stats: reduce(stats[key])\n")
    used = len(inspect.stack(0))
    for left in range(12, 60):  # what is left of the stack when the collective is called
        _at_depth(sys.getrecursionlimit() - used - left, program)
    assert labels_of(program) == ["a", "b"]


def _at_depth(depth: int, program: Callable[[Stats], Any]) -> None:
    if depth > 0:
        _at_depth(depth - 1, program)
    else:
        program({"a": torch.empty(0)})


def test_a_very_long_function_is_not_taken_apart() -> None:
    """The library that lists a function's instructions needs the square of its jumps: half a minute for these."""
    lines = "".join(f"    x = x + {number} if x else x\n" for number in range(15_000))
    seconds = []

    def look(*_: Any) -> None:
        started = time.thread_time()
        is_readable(sys._getframe(1))
        seconds.append(time.thread_time() - started)

    namespace: dict[str, Any] = {"look": look}
    exec(f"def program():\n    x = 0\n{lines}    look()\n    vars(x) if x else None\n", namespace)
    namespace["program"]()
    assert seconds[0] < 1


# -- call sites --------------------------------------------------------------------------------------------------------


def test_the_site_is_the_users_line() -> None:
    def where() -> Any:
        return site_of(calling_frame(1)[0])

    site = where()
    assert "test_labels.py" in str(site)
    assert site.source() == "return site_of(calling_frame(1)[0])"


@pytest.mark.parametrize("wing", ["guard", "dump.collect._calls", "capture", "sentinel"])
def test_a_wing_that_watches_the_program_is_no_part_of_it(wing: str) -> None:
    between: dict[str, Any] = {"__name__": f"ddpstats.{wing}", "calling_frame": calling_frame}
    exec("def call(): return calling_frame(1)", between)
    frame, by_torch, _ = between["call"]()
    assert "test_labels.py" in str(site_of(frame))
    assert not by_torch

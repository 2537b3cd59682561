"""What a rank does with a test of pytest's: import its file, call it, and write down how it failed."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib.machinery
import importlib.util
import json
import logging
import os
import pickle
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest
import torch.distributed as dist

from ddpstats.errors import DdpstatsError
from ddpstats.guard import collective_guard, ending


@dataclasses.dataclass(frozen=True)
class RankTest:
    """Which test: ``name`` of the class ``holder``, if there is one, in a file; what it is called with, each pickled.

    ``guard``: arguments of `collective_guard`; None without one. ``filters``: of warnings, that hold in the test: each
    pickled, and what `warnings.filterwarnings` takes.
    """

    module: str
    path: str
    holder: str
    name: str
    arguments: Mapping[str, bytes]
    guard: tuple[tuple[Any, ...], Mapping[str, Any]] | None
    filters: Sequence[bytes]


def class_names(found: type) -> list[str]:
    """It and those that it is made from, each as MODULE:QUALNAME, the most special one first."""
    return [f"{one.__module__}:{one.__qualname__}" for one in found.__mro__]


@dataclasses.dataclass(frozen=True)
class Failure:
    """``at``: seconds of a clock that all processes of this machine share. ``kind``: "fail", "skip" or "xfail".

    ``classes``: the exception's `class_names`.
    """

    at: float
    kind: str
    line: str
    text: str
    classes: list[str]

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        now = time.monotonic()
        classes = class_names(type(error))
        kinds = (("skip", pytest.skip.Exception), ("xfail", pytest.xfail.Exception))
        kind = next((name for name, raised in kinds if isinstance(error, raised)), "")
        if kind:
            return cls(now, kind, str(error), "", classes)
        text = str(pytest.ExceptionInfo.from_exception(error).getrepr(style="short"))
        said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return cls(now, "fail", said.split("\n", 1)[0], text, classes)

    @classmethod
    def read(cls, scratch: Path, rank: int) -> Failure | None:
        """None where the rank wrote none."""
        try:
            return cls(**json.loads((scratch / f"failure{rank}").read_text()))
        except FileNotFoundError:
            return None


def run_test(test: RankTest, scratch: str) -> None:
    """Call the test. A rank on which it fails ends at once: others see that sooner than they give up waiting."""
    __tracebackhide__ = True
    rank = dist.get_rank()
    output = open(Path(scratch, f"output{rank}"), "w", buffering=1)  # noqa: SIM115  # as long as the process lives
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    sys.stdout = output
    dist.barrier()  # no rank is to fail while another still connects
    try:
        _call(test, Path(scratch, f"warnings{rank}"))
    except BaseException as error:
        failure = dataclasses.asdict(Failure.of(error))
        written = Path(scratch, f"writing{rank}")
        written.write_text(json.dumps(failure))
        written.rename(Path(scratch, f"failure{rank}"))
        output.flush()
        os._exit(1)


def _call(test: RankTest, warned: Path) -> None:
    __tracebackhide__ = True
    found: Any = _imported(test.module, test.path)
    if test.holder:
        found = functools.reduce(getattr, test.holder.split("."), found)()
    given = {name: pickle.loads(value) for name, value in test.arguments.items()}
    call = functools.partial(getattr(found, test.name), **given)
    with _warnings_into(warned, test.filters):
        if test.guard is None:
            _call_guarded(call, contextlib.nullcontext(), ending.verdict)
        else:
            arguments, named = test.guard
            guard = collective_guard(*arguments, **named)
            _call_guarded(call, guard, lambda: guard.verdict)


@contextlib.contextmanager
def _warnings_into(path: Path, filters: Sequence[bytes]) -> Iterator[None]:
    """A line for each, at once: the rank may be ended. Also of what our own logger warns of, whatever the filters say.

    A filter of a class that this rank has not, or whose module cannot be imported here, is of no use.
    """
    __tracebackhide__ = True
    with path.open("w", buffering=1) as file, warnings.catch_warnings():
        warnings.resetwarnings()
        for pickled in filters:
            with contextlib.suppress(Exception, SystemExit, pytest.skip.Exception):
                action, message, category, module, lineno = pickle.loads(pickled)
                warnings.filterwarnings(action, message, category, module, lineno, append=True)

        def write(
            message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any, **__: Any
        ) -> None:
            print(json.dumps([str(message), class_names(category), filename, lineno]), file=file)

        def of_logger(record: logging.LogRecord) -> bool:
            if record.levelno >= logging.WARNING:
                write(record.getMessage(), UserWarning, record.pathname, record.lineno)
            return True

        warnings.showwarning = write
        logger = logging.getLogger("ddpstats")
        logger.addFilter(of_logger)
        try:
            yield
        finally:
            logger.removeFilter(of_logger)


def _call_guarded(
    call: Callable[[], object],
    guard: contextlib.AbstractContextManager[Any],
    found: Callable[[], DdpstatsError | None],
) -> None:
    """Of a test that fails by itself, that is told; else what its guard has found, which the test may have caught."""
    __tracebackhide__ = True
    try:
        with guard:
            call()
    except (pytest.skip.Exception, pytest.xfail.Exception):
        if found() is None:
            raise
    if (verdict := found()) is not None:
        raise verdict


def _imported(name: str, path: str) -> ModuleType:
    """By its path: pytest has ways to import a file (``--import-mode=importlib``) that leave no name to import."""
    parent = name.rpartition(".")[0]
    if parent and Path(path).name != "__init__.py":
        _import_package(parent, Path(path).parent)
    spec = importlib.util.spec_from_file_location(name, path, loader=_Rewriting(name, path))
    assert spec is not None
    module = _begun(spec)
    _Rewriting(name, path).exec_module(module)
    return module


def _import_package(name: str, directory: Path) -> None:
    """For imports relative to it. By its path as well: another package of that name may be found first."""
    if name in sys.modules:
        return
    parent = name.rpartition(".")[0]
    if parent:
        _import_package(parent, directory.parent)
    init, places = directory / "__init__.py", [str(directory)]
    spec = importlib.util.spec_from_file_location(name, init, submodule_search_locations=places)
    if not init.is_file():
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = places
    assert spec is not None
    module = _begun(spec)
    if init.is_file():
        assert spec.loader is not None
        spec.loader.exec_module(module)


def _begun(spec: importlib.machinery.ModuleSpec) -> ModuleType:
    """Where imports look for it; its text has not run yet."""
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    parent, _, own = spec.name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], own, module)
    return module


class _Rewriting(importlib.machinery.SourceFileLoader):
    """With pytest's asserts, which say what they compared."""

    def get_code(self, fullname: str) -> CodeType:
        from _pytest.assertion.rewrite import rewrite_asserts  # pytest's own; it has none that is public

        path = self.get_filename(fullname)
        source = self.get_data(path)
        tree = ast.parse(source, path)
        rewrite_asserts(tree, source, path)
        return compile(tree, path, "exec", dont_inherit=True)

"""`StatsDump`: which steps are collected, and what watches the program meanwhile.

1. `start` looks whether this step and rank are wanted. If not, that is all that happens.
2. It makes the step's `Recorder`, puts hooks on the modules (L0, mix), shows it the calls (L1, mix) and the collectives
   (L1, mix, where there is torch.distributed).
3. `stop` takes all of that away, whatever happened, and has the files written.
4. `step` ends the step. Until then `start` may come again: a step can be collected in pieces.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from ddpstats._base.lazy import breaks_graph
from ddpstats.dump.config import DumpConfig, read_config
from ddpstats.dump.msprobe import DUMP, LINES
from ddpstats.dump.record.calls import CallWatch
from ddpstats.dump.record.modules import ModuleWatch
from ddpstats.dump.record.recorder import Recorder
from ddpstats.errors import ConfigError, DumpError


class StatsDump:
    """Writes statistics of what modules and functions of torch take and give, forward and backward, for chosen steps.

    Local: ranks need not agree on anything, each writes its own ``dump_path/step{N}/rank{R}/`` (``rank`` where neither
    torch.distributed nor RANK in the environment tells a number). Values, gradients and random state of the program are
    bit for bit what they are without it; only in evaluation without gradients torch's fused transformer layers step
    aside while calls are watched, which gives other last bits. Names do not depend on what is selected. Modules are
    named as in the model inside DistributedDataParallel.

    What is not seen: the inside of ``torch.compile`` (where it is compiled in the meantime, some of the compiler's own
    calls are) and of ``torch.autograd.Function``, other threads and forked processes, numbers while a CUDA graph is
    captured, and on an accelerator calls (not modules) of a forward pass that activation checkpointing runs once more.
    Gradients of FSDP2's sharded parameters are those at the end of the backward pass: reduced, and accumulated.

    `start` and `stop` belong into one thread, and on the same side of ``with torch.device(...)`` and other modes.

    Args:
        config: path of a config.json, or a mapping of the same keys; see the documentation of the keys.
        model: the modules for the levels L0 and mix: one, a list, or a dict by name. `start` takes it as well.

    Raises:
        ConfigError: the configuration is wrong; the message names the key and the legal values.
        DumpError: ``dump_path`` cannot be written to, or holds a dump of a chosen step and this rank already.

    Example, on rank 0 and rank 1 alike::

        dump = StatsDump("config.json", model=model)
        for batch in loader:
            dump.start()
            loss = model(batch)
            loss.backward()
            dump.stop()
            optimizer.step()
            dump.step()
    """

    def __init__(self, config: str | os.PathLike[str] | Mapping[str, object], *, model: Any = None) -> None:
        given = read_config(config)
        self._config = replace(given, dump_path=given.dump_path.absolute())  # the program may change its directory
        self._model = _checked(model)
        self._step = 0
        self._watches: list[Any] = []
        self._recorder: Recorder | None = None
        self._is_running = False
        self._left: list[Any] = []  # watches that only their own thread can take away
        self._has_warned = self._has_warned_of_ranks = False
        _check_path(self._config)
        _all.add(self)

    def __getstate__(self) -> dict[str, Any]:
        """A copy collects nothing until it is started."""
        return {**vars(self), "_watches": [], "_recorder": None, "_is_running": False, "_left": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        _all.add(self)

    @property
    def config(self) -> DumpConfig:
        """What was read."""
        return self._config

    @property
    def current_step(self) -> int:
        """How often `step` was called."""
        return self._step

    @breaks_graph
    def start(self, model: Any = None) -> None:
        """Collect from here on, if this step and this rank are chosen; before the forward pass.

        Args:
            model: takes the place of the constructor's.

        Raises:
            ConfigError: the level is L0 or mix, and there is no model.
            DumpError: there is a dump of this step and rank already, or its directory cannot be made.
        """
        if self._is_running or not self._config.wants_step(self._step):
            return
        self._take_left()
        rank = _rank()
        self._warn_of_ranks()
        if not self._config.wants_rank(rank):
            return
        if model is not None:
            self._model = _checked(model)
        if self._config.level != "L1" and self._model is None:
            raise ConfigError(
                f"level {self._config.level} collects modules: give the model, as StatsDump(config, model=model) or "
                "start(model); level L1 needs none"
            )
        self._open(rank)
        self._install()

    @breaks_graph
    def stop(self) -> None:
        """Collect no longer, and write the files; after the backward pass. Does nothing where nothing is collected.

        What could not be collected or written is warned about when that is done; it raises nothing but what warnings
        are turned into.
        """
        self._take_left()
        if not self._is_running:
            return
        self._uninstall().close()

    @breaks_graph
    def step(self) -> None:
        """The training step is over: the next one begins. Stops first, where that was forgotten."""
        try:
            self.stop()
        finally:
            self._recorder = None
            self._step += 1

    def _warn_of_ranks(self) -> None:
        if not self._has_warned_of_ranks:
            self._has_warned_of_ranks = True
            for problem in self._config.problems(_world_size()):
                warnings.warn(f"ddpstats: the dump's configuration: {problem}", stacklevel=4)

    def __enter__(self) -> StatsDump:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _open(self, rank: int | None) -> None:
        directory = _directory(self._config, self._step, rank)
        try:
            if self._recorder is not None:
                self._recorder.reopen()
                return
            _check_empty(directory)
            self._recorder = Recorder(self._config, directory)
        except FileExistsError:
            raise DumpError(
                f"{directory} is written to by another process. Ranks are told apart by torch.distributed, if that is "
                "initialized before start, or by RANK in the environment; or give another dump_path.",
                path=str(directory),
            ) from None
        except OSError as error:
            raise DumpError(f"{directory} cannot be written: {error}", path=str(directory)) from None

    def _install(self) -> None:
        recorder = self._recorder
        assert recorder is not None
        self._is_running = True
        _running.add(self)
        try:
            if self._config.level != "L1":
                modules = ModuleWatch(recorder, self._model)
                self._warn_of_compiled(modules.has_compiled)
                self._begin(modules)
            if self._config.level != "L0":
                if dist.is_available() and dist.is_initialized():
                    from ddpstats.dump.record.collectives import CollectiveWatch

                    self._begin(CollectiveWatch(recorder))
                self._begin(CallWatch(recorder))
        except BaseException:
            self._uninstall()
            if recorder.abandon():
                self._recorder = None
            raise

    def _begin(self, watch: Any) -> None:
        self._watches.append(watch)
        watch.start()

    def _uninstall(self) -> Recorder:
        """Returns what has collected the step so far."""
        self._is_running = False
        _running.discard(self)
        watches, self._watches = self._watches, []
        recorder = self._recorder
        assert recorder is not None
        for watch in reversed(watches):
            try:
                if watch.stop() is False:
                    self._left.append(watch)
            except Exception as error:
                recorder.note_error("stopping", error)
        return recorder

    def _take_left(self) -> None:
        if self._left:
            self._left = [watch for watch in self._left if watch.stop() is False]

    def _forget(self) -> None:
        """In a process that was forked from the one that collects: the files are not this one's."""
        self._is_running = False
        watches, self._watches = self._watches, []
        if self._recorder is not None:
            self._recorder.forget()
        for watch in watches:
            with contextlib.suppress(Exception):
                watch.forget()
        self._recorder = None

    def _warn_of_compiled(self, has_compiled: bool) -> None:
        if has_compiled and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "ddpstats: the model has parts under torch.compile or TorchScript: what is inside them is not in the "
                "dump. Run without that to see it.",
                stacklevel=5,
            )


_running: set[StatsDump] = set()
_all: WeakSet[StatsDump] = WeakSet()


@atexit.register
def _at_exit() -> None:
    for dump in list(_running):
        dump._uninstall().break_off()


def _in_forked() -> None:
    """Workers of a DataLoader are forked inside the step, or between two pieces of it, and go on with all there was."""
    for dump in list(_all):
        dump._forget()
    _running.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_forked)


def _rank() -> int | None:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    rank = os.environ.get("RANK", "")  # torchrun's
    return int(rank) if rank.isdigit() else None


def _world_size() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    size = os.environ.get("WORLD_SIZE", "")
    return int(size) if size.isdigit() else 1


def _directory(config: DumpConfig, step: int, rank: int | None) -> Path:
    return config.dump_path / f"step{step}" / ("rank" if rank is None else f"rank{rank}")


def _checked(model: Any) -> Any:
    if model is None or isinstance(model, torch.nn.Module):
        return model
    parts = list(model.values()) if isinstance(model, dict) else list(model) if isinstance(model, (list, tuple)) else []
    if parts and all(isinstance(part, torch.nn.Module) for part in parts):
        return model
    raise ConfigError(f"model is a {type(model).__name__}; legal: a torch.nn.Module, or a list or dict of modules")


def _check_path(config: DumpConfig) -> None:
    root = config.dump_path
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            pass
    except OSError as error:
        raise DumpError(
            f"dump_path {root} cannot be written to: {error.strerror or error}. Give a directory that can.",
            path=str(root),
        ) from None
    rank = _rank()
    if not config.wants_rank(rank):
        return
    for step in root.glob("step*"):
        number = step.name.removeprefix("step")
        if number.isdigit() and config.wants_step(int(number)):
            _check_empty(_directory(config, int(number), rank))


def _check_empty(directory: Path) -> None:
    for name in (DUMP, LINES):
        if (directory / name).exists():
            raise DumpError(
                f"{directory} holds a dump already ({name}), and nothing is overwritten. Give another dump_path, or "
                "remove that directory.",
                path=str(directory),
            )

"""`StatsDump` records the chosen steps of one rank: calls, modules, backward passes and collectives.

1. `start` looks whether this step and rank are wanted. If not, that is all that happens.
2. It makes the step's `Recorder`, puts hooks on the modules (L0, mix), shows it the calls (L1, mix) and the collectives
   (L1, mix, where there is torch.distributed).
3. `stop` takes all of that away, whatever happened. `start` may come again: a step can be recorded in pieces.
4. `step` ends the step, and has its files written; so does the end of the process.
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
from typing import Any

import torch
import torch.distributed as dist

from ddpstats._base.lazy import breaks_graph
from ddpstats.dump.config import DumpConfig, read_config
from ddpstats.dump.msprobe import DUMP, LINES, rank_directory, steps_in
from ddpstats.dump.record.calls import CallWatch
from ddpstats.dump.record.modules import ModuleWatch
from ddpstats.dump.record.recorder import Recorder
from ddpstats.errors import ConfigError, DumpError

_COMPILED = (
    "the model has parts under torch.compile or TorchScript: what is inside them is not in the dump. Run without that "
    "to see it."
)


class StatsDump:
    """Writes statistics of what modules and functions of torch take and return, forward and backward, in chosen steps.

    Each rank writes its own ``dump_path/step{N}/rank{R}/`` (``rank`` where neither torch.distributed nor RANK in the
    environment gives a number), and ranks need not agree on anything. Values, gradients and random state of the program
    are bit for bit what they are without it; only in evaluation without gradients torch's fused transformer layers are
    not used while calls are watched, which gives other last bits. Names do not depend on what is selected. Modules are
    named as in the model inside DistributedDataParallel.

    While a step runs its entries are lines of ``dump.jsonl`` (with ``async_dump``, from `stop` on), which a
    process that is killed leaves. At `step`, or at the exit of the process, these become the files of the format.

    What is not seen: the inside of ``torch.compile`` (where it is compiled in the meantime, some of the compiler's own
    calls are) and of ``torch.autograd.Function``, other threads and forked processes, numbers while a CUDA graph is
    captured, and on an accelerator calls (not modules) of a forward pass that activation checkpointing runs once more.
    Gradients of FSDP2's sharded parameters are those that it leaves in ``grad``: reduced, and accumulated.

    `start` and `stop` belong into one thread, and on the same side of ``with torch.device(...)`` and other modes.

    Args:
        config: path of a config.json, or a mapping of the same keys; see the documentation of the keys.
        model: the modules for the levels L0 and mix: one, a list, or a dict by name. `start` takes it as well.

    Raises:
        ConfigError: the configuration is wrong; the message names the key and the legal values.
        DumpError: ``dump_path`` cannot be written to, or holds a dump of a chosen step and this rank already.

    Example, on every rank::

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
        read = read_config(config)
        self._config = replace(read, dump_path=read.dump_path.absolute())  # the program may change its directory
        self._model = _check_model(model)
        self._step = 0
        self._recorder: Recorder | None = None
        self._warned: set[str] = set()
        _check_path(self._config)

    def __getstate__(self) -> dict[str, Any]:
        """A copy records nothing until it is started."""
        return {**vars(self), "_recorder": None}

    @property
    def config(self) -> DumpConfig:
        """The configuration that was read."""
        return self._config

    @breaks_graph
    def start(self, model: Any = None) -> None:
        """Record from here on, if this step and this rank are chosen; before the forward pass.

        Args:
            model: takes the place of the constructor's.

        Raises:
            ConfigError: the level is L0 or mix, and there is no model.
            DumpError: there is a dump of this step and rank already, or its directory cannot be made.
        """
        if self._watches or not self._config.wants_step(self._step):
            return
        rank, level = _rank(), self._config.level
        for problem in self._config.problems(_world_size()):
            self._warn(f"the dump's configuration: {problem}")
        if not self._config.wants_rank(rank):
            return
        if model is not None:
            self._model = _check_model(model)
        if level != "L1" and self._model is None:
            raise ConfigError(
                f"level {level} collects modules: give the model, as StatsDump(config, model=model) or start(model); "
                "level L1 needs none"
            )
        if self._recorder is None or self._recorder not in _unfinished:
            self._recorder = _open(self._config, rank_directory(self._config.dump_path, self._step, rank))
            _unfinished[self._recorder] = []
        else:
            self._recorder.resume()
        try:
            if level != "L1":
                modules = ModuleWatch(self._recorder, self._model)
                if modules.has_compiled:
                    self._warn(_COMPILED)
                self._begin(modules)
            if level != "L0":
                if dist.is_available() and dist.is_initialized():
                    from ddpstats.dump.record.collectives import CollectiveWatch

                    self._begin(CollectiveWatch(self._recorder))
                self._begin(CallWatch(self._recorder))
        except BaseException:
            self.stop()
            raise

    @breaks_graph
    def stop(self) -> None:
        """Record no longer; after the backward pass. Does nothing where nothing is recorded. It raises nothing."""
        if self._recorder is not None:
            _stop(self._recorder)

    @breaks_graph
    def step(self) -> None:
        """The training step is over: write its files, and begin the next one. Stops first, where that was forgotten.

        What could not be recorded or written is warned about; it raises only where warnings are errors.
        """
        self.stop()
        self._step += 1
        recorder, self._recorder = self._recorder, None
        if recorder is not None and _unfinished.pop(recorder, None) is not None:
            recorder.finish()
            recorder.warn()

    def __enter__(self) -> StatsDump:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def _watches(self) -> list[Any]:
        return [] if self._recorder is None else _unfinished.get(self._recorder, [])

    def _begin(self, watch: Any) -> None:
        self._watches.append(watch)
        watch.start()

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(f"ddpstats: {text}", stacklevel=4)


_unfinished: dict[Recorder, list[Any]] = {}  # steps of this process without their files -> what watches the program


def _stop(recorder: Recorder) -> None:
    watches = _unfinished.get(recorder)
    if watches:
        _unfinished[recorder] = []
        for watch in reversed(watches):
            with recorder.safely("stopping"):
                watch.stop()
        recorder.pause()


@atexit.register
def _at_exit() -> None:
    """Write what is complete. Of a step that the process ends inside, the lines stay, which readers call incomplete."""
    for recorder, watches in list(_unfinished.items()):
        _stop(recorder)
        if not watches:
            recorder.finish()
    recorders = [*_unfinished]
    _unfinished.clear()
    with contextlib.ExitStack() as stack:
        for recorder in recorders:
            stack.callback(recorder.warn)  # which raises where warnings are errors


def _forget_in_fork() -> None:
    """Drop the steps of the parent: a DataLoader's workers are forked inside a step, or between two pieces of it."""
    for recorder, watches in _unfinished.items():
        recorder.forget()
        for watch in watches:
            with contextlib.suppress(Exception):
                watch.forget()
    _unfinished.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_fork)


def _open(config: DumpConfig, directory: Path) -> Recorder:
    try:
        _check_empty(directory)
        return Recorder(config, directory)
    except FileExistsError:
        raise _not_empty(directory) from None
    except OSError as error:
        raise _unwritable(directory, error) from None


def _rank() -> int | None:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return _from_launcher("RANK")


def _world_size() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return _from_launcher("WORLD_SIZE") or 1


def _from_launcher(name: str) -> int | None:
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else None


def _check_model(model: Any) -> Any:
    if model is None or isinstance(model, torch.nn.Module):
        return model
    parts = list(model.values()) if isinstance(model, dict) else list(model) if isinstance(model, (list, tuple)) else []
    if parts and all(isinstance(part, torch.nn.Module) for part in parts):
        return model
    raise ConfigError(f"model is a {type(model).__name__}; legal: a torch.nn.Module, or a list or dict of modules")


def _check_path(config: DumpConfig) -> None:
    root, rank = config.dump_path, _rank()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            pass
    except OSError as error:
        raise _unwritable(root, error) from None
    for step in steps_in(root):
        if config.wants_step(step) and config.wants_rank(rank):
            _check_empty(rank_directory(root, step, rank))


def _check_empty(directory: Path) -> None:
    if (directory / DUMP).exists() or (directory / LINES).exists():
        raise _not_empty(directory)


def _not_empty(directory: Path) -> DumpError:
    return DumpError(
        f"{directory} holds a dump already, or another process writes one, and nothing is overwritten. Give another "
        "dump_path, or remove that directory. Ranks have numbers by torch.distributed, if that is initialized before "
        "start, or by RANK in the environment; without either, all processes write to `rank`.",
        path=str(directory),
    )


def _unwritable(directory: Path, error: OSError) -> DumpError:
    return DumpError(f"{directory} cannot be written to: {error}. Give another dump_path.", path=str(directory))

"""A forward pass of a module or a function: its entry, and what is to be seen of its backward pass (`backward`).

Inputs are measured before the call, for it may overwrite them; outputs after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ddpstats._observe.torch_compat import no_dispatch_no_grad
from ddpstats.dump.msprobe import backward_of
from ddpstats.dump.record.arguments import tensors_in
from ddpstats.dump.record.backward import Before, watch_backward
from ddpstats.dump.record.recorder import OpenEntry, Recorder


class ForwardPass:
    """One that has got its name, inside ``parents``."""

    __slots__ = ("_before", "_entry", "_recorder", "_stack", "name", "parents")

    def __init__(self, recorder: Recorder, name: str, parents: Sequence[str]) -> None:
        self._recorder, self.name, self.parents = recorder, name, parents
        self._stack = 0
        self._entry: OpenEntry | None = None
        self._before: Before | None = None

    @property
    def is_seen(self) -> bool:
        """Whether anything of it is wanted."""
        return self._entry is not None or self._before is not None

    def begins(self, args: Any, kwargs: Any, module: nn.Module | None = None) -> None:
        recorder = self._recorder
        try:
            is_wanted = recorder.wants(self.name)
            if torch.is_grad_enabled() and recorder.may_want_backward(backward_of(self.name), self.parents):
                self._before = Before(tensors_in([args, list(kwargs.values())] if kwargs else args))
            if is_wanted:
                self._entry = self._begun(args, kwargs, module)
                self._stack = self._entry.stack
            elif self._before is not None:
                self._stack = recorder.stack()
        except Exception as error:
            recorder.note_error(self.name, error)

    def _begun(self, args: Any, kwargs: Any, module: nn.Module | None) -> OpenEntry:
        recorder = self._recorder
        entry = recorder.entry(self.name)
        if recorder.wants_input:
            leaves = recorder.leaves_of(self.name)
            with no_dispatch_no_grad():
                entry.raw["input_args"] = leaves.of(args, "input")
                entry.raw["input_kwargs"] = leaves.of(kwargs, "input_kwargs")
                if module is not None:
                    own = dict(module.named_parameters(recurse=False))
                    entry.raw["parameters"] = leaves.of(own, "parameters")
        return entry

    def ends(self, result: Any) -> None:
        recorder = self._recorder
        try:
            if self._entry is not None:
                recorder.write_with_output(self._entry, result)
            if self._before is not None:
                watch_backward(recorder, backward_of(self.name), self._before, result, self._stack, self.parents)
        except Exception as error:
            recorder.note_error(self.name, error)

    def fails(self, error: BaseException) -> None:
        if self._entry is not None:
            try:
                self._recorder.write_failed(self._entry, error)
            except Exception as our_error:
                self._recorder.note_error(self.name, our_error)

"""Programs of `test_interference`: each trains once without ddpstats, and then with all of it in each way.

``python -m tests.interference.runs STEPS [BACKEND [NAME ...]]`` runs all programs, or these, on two ranks, and says
where they differ.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import random
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpstats.testing import RankPool
from tests.interference import programs
from tests.interference.programs import PROGRAMS, Program
from tests.interference.watching import Everything, Watch

WAYS = {"step, in one call": ("step", True), "strict, each by its own call": ("strict", False)}
_COLUMNS = ("random streams before", "loss", "gradients", "parameters, buffers, optimizers", "random streams after")


@dataclass
class Comparison:
    """The comparison on one rank: how the program differs from the plain one, in words, for each way to watch it."""

    differences: dict[str, list[str]] = field(default_factory=dict)
    did: dict[str, dict[str, int]] = field(default_factory=dict)


def compared(
    name: str,
    steps: int,
    directory: str,
    disturb: Callable[[Program], None] | None = None,
    ways: Sequence[str] = tuple(WAYS),
) -> Comparison:
    """Train plainly, then in each of the `WAYS`. ``disturb`` is what a watcher that disturbs would do in each step."""
    comparison = Comparison()
    with warnings.catch_warnings(), _quiet():
        warnings.simplefilter("ignore")
        plain, _ = _train(name, steps, None, None)
        for way in ways:
            mode, together = WAYS[way]
            path = Path(directory) / mode
            rows, comparison.did[way] = _train(name, steps, (path, mode, together), disturb)
            comparison.differences[way] = _differences(plain, rows)
    return comparison


def _train(
    name: str, steps: int, watched: tuple[Path, Any, bool] | None, disturb: Callable[[Program], None] | None
) -> tuple[list[tuple[Any, ...]], dict[str, int]]:
    """Return a row of digests for each step, one before the first and one after the last, and what was done."""
    torch.compiler.reset()
    _seed(0)
    program = PROGRAMS[name]()
    _seed(100 + dist.get_rank())
    rows = [_surroundings(program)]
    did: dict[str, int] = {}
    with contextlib.ExitStack() as stack:
        watch = Watch() if watched is None else Everything(program.parts, *watched, stack)
        gradients = _Gradients(program)
        for number in range(steps):
            before = _random()
            watch.begin()
            loss = program.step(watch, number)
            watch.end(number, loss)
            if disturb is not None:
                disturb(program)
            rows.append((before, _digest([loss]), gradients.taken(), _digest(_state(program)), _random()))
        gradients.remove()
        if isinstance(watch, Everything):
            did = {**watch.did, "compared": watch.guard.counters.compared}
    if watched is not None:
        did["bundles"] = len(list(watched[0].glob("capture*/capture-*")))
        did["dumps"] = len(list(watched[0].glob(f"dump/step*/rank{dist.get_rank()}")))
    rows.append(_surroundings(program))
    return rows, did


def _differences(plain: list[tuple[Any, ...]], watched: list[tuple[Any, ...]]) -> list[str]:
    differences = [f"after all: {b} in place of {a}" for a, b in zip(plain[-1], watched[-1], strict=True) if a != b]
    for number, (row, watched_row) in enumerate(zip(plain[1:-1], watched[1:-1], strict=True)):
        columns = [what for what, a, b in zip(_COLUMNS, row, watched_row, strict=True) if a != b]
        if columns:
            return [f"step {number}: {', '.join(columns)}", *differences]
    return differences


class _Gradients:
    """Digests of the gradients that the optimizers take."""

    def __init__(self, program: Program) -> None:
        self._digests: list[bytes] = []
        self._hooks = [
            optimizer.register_step_pre_hook(self._look) for part in program.parts for optimizer in part.optimizers
        ]

    def _look(self, optimizer: Any, *_: Any) -> None:
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        self._digests.append(_digest(parameter.grad for parameter in parameters if parameter.grad is not None))

    def taken(self) -> tuple[bytes, ...]:
        """Return the digests since the last call."""
        digests, self._digests = tuple(self._digests), []
        return digests

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _state(program: Program) -> Iterable[Any]:
    for part in program.parts:
        yield from part.module.parameters()
        yield from part.module.buffers()
        for optimizer in part.optimizers:
            yield from _tensors(optimizer.state_dict()["state"])


def _tensors(tree: Any) -> Iterable[Any]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _tensors(value)
    else:
        yield torch.tensor(list(repr(tree).encode()))


def _digest(tensors: Iterable[Any]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        for part in (local._indices(), local._values()) if local.is_sparse else (local,):
            digest.update(part.detach().cpu().contiguous().numpy().tobytes())
    return digest.digest()


def _seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def _random() -> bytes:
    numpy = np.random.get_state(legacy=False)
    device = torch.get_default_device()
    of_device = b"" if device.type == "cpu" else torch.get_device_module(device).get_rng_state().numpy().tobytes()
    return hashlib.blake2b(
        torch.get_rng_state().numpy().tobytes()
        + of_device
        + repr((random.getstate(), numpy, numpy["state"]["key"].tolist())).encode()
    ).digest()


def _surroundings(program: Program) -> tuple[Any, ...]:
    """Return what a program could find changed around it when all is over."""
    return (
        ("hooks", sum(hooks_of(part.module) for part in program.parts)),
        ("threads", sorted(thread.name for thread in threading.enumerate() if not _is_known(thread))),
        ("grad mode", torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        ("dtype", torch.get_default_dtype(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()),
        ("autocast", torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()),
        ("logging", [type(handler).__name__ for handler in logging.getLogger("ddpstats").handlers], logging.root.level),
        ("directory", os.getcwd(), sys.stdout is sys.__stdout__),
    )


def _is_known(thread: threading.Thread) -> bool:
    """Return whether the thread is ours for good, or autograd's of a device, which Python names when a hook asks."""
    is_of_device = isinstance(thread, threading._DummyThread) and torch.get_default_device().type != "cpu"
    return is_of_device or thread.name.startswith("ddpstats")


def hooks_of(module: nn.Module) -> int:
    count = sum(
        len(part._forward_hooks) + len(part._forward_pre_hooks) + len(part._backward_hooks) for part in module.modules()
    )
    for parameter in module.parameters():
        count += len(parameter._post_accumulate_grad_hooks or ()) + len(parameter._backward_hooks or ())
    return count


@contextlib.contextmanager
def _quiet() -> Any:
    """The errors that a capture logs are wanted here."""
    logger = logging.getLogger("ddpstats")
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = False


# -- watchers that would be seen --------------------------------------------------------------------------------------


def draws_from_torch(program: Program) -> None:
    torch.rand(1)


def draws_from_python(program: Program) -> None:
    random.random()


def draws_from_numpy(program: Program) -> None:
    np.random.rand()


def changes_a_bit(program: Program) -> None:
    parameter = next(program.parts[0].module.parameters())
    parameter.data.view(-1)[0] = torch.nextafter(parameter.data.view(-1)[0], torch.tensor(9.0))


def leaves_a_hook(program: Program) -> None:
    program.parts[0].module.register_forward_hook(lambda *_: None)


def all_programs(steps: int, backend: str, *names: str) -> int:
    """Compare all programs on two ranks, or those with these names; return how many of them differ."""
    failed = 0
    with RankPool(2, timeout_sec=3600) as pool, tempfile.TemporaryDirectory() as directory:
        pool.run(set_backend, backend).values()
        for name in names or PROGRAMS:
            started = time.monotonic()
            ranks = pool.run(compared, name, steps, f"{directory}/{name}").values()
            lines = {f"{way}: {text}" for rank in ranks for way, texts in rank.differences.items() for text in texts}
            failed += bool(lines)
            print(f"{name}: {'; '.join(sorted(lines)) or 'equal'} ({time.monotonic() - started:.0f} s)", flush=True)
            print(f"    {ranks[0].did}", flush=True)
    return failed


def set_backend(backend: str) -> None:
    programs.backend = backend
    if backend == "inductor":  # a step that is run again is another graph, and would draw other random numbers
        torch._inductor.config.fallback_random = True


if __name__ == "__main__":
    from tests.interference import runs  # ranks import what they run

    raise SystemExit(runs.all_programs(int(sys.argv[1]), *(sys.argv[2:] or ["aot_eager"])) > 0)

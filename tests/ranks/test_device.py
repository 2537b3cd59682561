"""Devices are named in one module, and what a device lacks is done without. What real devices do: tests/gpu."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ddpstats
from ddpstats._ranks import device as devices
from ddpstats._ranks.device import HostCopy
from tests import programs

ROOT = Path(ddpstats.__file__).parent
HOME = ROOT / "_ranks" / "device.py"
MODULES = ("cuda", "xpu", "mps", "mtia", "npu", "hpu", "mlu", "musa", "xla")
CPU = torch.device("cpu")


def device_modules(source: str) -> Iterator[str]:
    """Yield the modules of devices that a program names: as attributes of torch, and in imports."""
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names] + [str(node.module)]
        yield from (name for name in names if name in {f"torch.{module}" for module in MODULES})


def test_no_other_file_names_the_module_of_a_device() -> None:
    named = {path: [*device_modules(path.read_text())] for path in ROOT.rglob("*.py") if path != HOME}
    assert {path.name: names for path, names in named.items() if names} == {}


@pytest.mark.parametrize(
    "line", ["torch.cuda.is_initialized()", "import torch.xpu", "from torch import cuda", "from torch.npu import Event"]
)
def test_a_named_module_is_seen(line: str) -> None:
    assert [*device_modules(f"import torch\n{line}\n")] != []
    assert [*device_modules("torch.backends.cuda.matmul; torch.version.cuda; torch.Event()")] == []


@pytest.mark.parametrize("error", [None, RuntimeError("Cannot access accelerator device when none is available.")])
def test_without_an_accelerator(monkeypatch: pytest.MonkeyPatch, error: RuntimeError | None) -> None:
    """Torch 2.6 raises where later ones return None."""

    def current() -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current)
    before = torch.get_rng_state()
    assert devices.accelerator() is None
    assert not devices.accelerator_in_use()
    assert not devices.is_capturing()
    assert devices.device_kinds() == ("cpu",)
    assert [devices.record_event(), devices.record_event(timing=True), devices.record_event(CPU)] == [None] * 3
    assert [devices.stream_number(CPU), devices.new_stream(CPU), devices.random_state(CPU)] == [None] * 3
    assert devices.device_name(CPU) == ""
    assert devices.widest_float(CPU) is torch.float64
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", ["meta", "mps", "xpu"])
def test_a_device_that_is_not_here_has_no_streams(kind: str) -> None:
    device = torch.device(kind)
    if kind in devices.device_kinds():
        pytest.skip(f"there is a device {kind} here")
    assert [devices.stream_number(device), devices.new_stream(device), devices.record_event(device)] == [None] * 3


def test_a_copy_of_what_is_on_the_host_is_a_copy() -> None:
    tensor = torch.ones(3)
    copy = HostCopy(tensor)
    tensor.zero_()
    assert copy.is_ready()
    assert copy.wait().tolist() == [1.0, 1.0, 1.0]


class LateEvent:
    """Stands for the event of a device that comes to it when it is waited for."""

    has_come = False

    def __init__(self, device: torch.device, enable_timing: bool = False) -> None:
        pass

    def record(self, stream: object) -> None:
        pass

    def query(self) -> bool:
        return self.has_come

    def synchronize(self) -> None:
        self.has_come = True

    def elapsed_time(self, end: LateEvent) -> float:
        raise RuntimeError("Backend doesn't support elapsedTime.")


def test_a_copy_is_ready_when_its_event_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_WITHOUT_STREAMS", ())
    monkeypatch.setattr(torch, "Event", LateEvent)
    copy = HostCopy(torch.arange(3))
    assert not copy.is_ready()
    assert copy.wait().tolist() == [0, 1, 2]
    assert copy.is_ready()


def test_a_device_that_cannot_ask_its_events_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host has no events in torch, and refuses to make any."""
    monkeypatch.setattr(devices, "_WITHOUT_STREAMS", ())
    assert devices.record_event(CPU) is None
    copy = HostCopy(torch.arange(3))
    assert copy.is_ready()
    assert copy.wait().tolist() == [0, 1, 2]


def test_a_device_that_counts_no_time() -> None:
    start, end = LateEvent(CPU), LateEvent(CPU)
    assert devices.seconds_between(start, end) == 0.0
    assert end.has_come


FAILS = (
    "def fail(*arguments): raise NotImplementedError\n"
    "names = 'is_initialized is_current_stream_capturing get_device_name current_stream get_rng_state set_rng_state'\n"
    "import types; torch.bare = types.SimpleNamespace(**dict.fromkeys(names.split(), fail))\n"
)


@pytest.mark.parametrize("module", ["", FAILS], ids=["no module", "a module whose functions raise"])
def test_a_backend_without_anything_says_nothing(module: str) -> None:
    """A plugin has registered its name, and no device."""
    program = (
        f"import torch; torch.utils.rename_privateuse1_backend('bare')\n{module}"
        "import ddpstats; from ddpstats._ranks import device as devices\n"
        "from ddpstats._observe.torch_compat import no_dispatch_no_grad\n"
        "bare = torch.device('bare', 0)\n"
        "assert not devices.is_capturing() and devices.device_kinds() == ('cpu', 'bare')\n"
        "assert devices.device_name(bare) == '' and devices.random_state(bare) is None\n"
        "assert devices.record_event() is devices.record_event(bare, timing=True) is None\n"
        "assert devices.new_stream(bare) is devices.stream_number(bare) is None\n"
        "assert devices.widest_float(bare) is torch.float32\n"
        "window = ddpstats.StatsWindow()\n"
        "with window.timed('step'): window.add({'x': torch.ones(1), 'n': 3})\n"
        "with torch.autocast('cpu'), no_dispatch_no_grad(): assert not torch.is_autocast_enabled('cpu')\n"
        "print(window.flush().values['x'], ddpstats.reduce_stats({'a': torch.ones(2).sum()}).values)"
    )
    ended = programs.run(["-c", program])
    assert (ended.stdout, ended.stderr) == ("1.0 {'a': 2.0}\n", "")

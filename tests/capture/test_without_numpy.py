"""A bundle that was written where numpy is can be replayed where it is not, and the other way round."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch

from ddpstats._rerun.state import RandomState
from tests import programs
from tests.capture import making, replay_models
from tests.capture.making import MODELS, captured
from tests.capture.replay_models import Small, Toy
from tests.capture.test_replay import FEW, NAN
from tests.needs import ROOT

pytestmark = pytest.mark.slow

# Python reads it at its start. The import fails as it does where there is no numpy, for C++ too.
BLOCKER = """
import sys
class _NoNumpy:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "numpy":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, _NoNumpy())
"""
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def without_numpy(tmp_path: Path) -> Run:
    """Return a function that runs Python where numpy is not."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(BLOCKER)
    environ = {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]), "PYTHONWARNINGS": "ignore"}
    return lambda *arguments: programs.run(arguments, environ=environ, fresh=True)


def replay(bundle: Path, model: str, step: str, *args: str) -> list[str]:
    names = ["--model", f"{MODELS}:{model}", "--step", f"{MODELS}:{step}"]
    return ["-m", "ddpstats", "replay", str(bundle), *names, *args]


def test_a_bundle_with_a_state_of_numpy_is_replayed(tmp_path: Path, without_numpy: Run) -> None:
    """Nothing can draw from numpy's generator there; what the others drew is drawn again."""
    numpy.random.seed(1)  # a program that has not loaded numpy.random keeps nothing of it
    assert RandomState.take(torch.device("cpu")).numpy is not None
    bundle = captured(tmp_path, Toy, replay_models.per_class_step, FEW, FEW)
    done = without_numpy(*replay(bundle, "Toy", "per_class_step", "--bisect"))
    assert done.returncode == 0, done.stderr
    for what in ("losses   ", "norms    ", "gradients"):
        assert f"  {what} equal\n" in done.stdout
    assert "damaged" not in done.stdout + done.stderr


def test_a_batch_with_arrays_needs_numpy_and_the_error_names_the_package(tmp_path: Path, without_numpy: Run) -> None:
    bundle = captured(tmp_path, Small, replay_models.mean_step, {**NAN, "lengths": numpy.arange(3)})
    done = without_numpy(*replay(bundle, "Small", "mean_step"))
    assert done.returncode == 2
    assert "batch['lengths'] is an array of numpy, which is not installed here: pip install numpy" in done.stderr
    assert "damaged" not in done.stderr


def test_a_bundle_that_was_written_without_numpy_is_replayed_with_it(tmp_path: Path, without_numpy: Run) -> None:
    code = (
        "import sys, torch, ddpstats\n"
        f"from {MODELS} import Small, mean_step\n"
        "model = Small()\n"
        "with ddpstats.NaNCapture(sys.argv[1], model=model) as capture:\n"
        "    with capture.micro_batch({'x': torch.full((2, 4), torch.nan)}) as kept:\n"
        "        kept.loss = mean_step(model, kept.batch)\n"
        "        kept.loss.backward()\n"
        "    print(capture.check().culprit_ranks, 'numpy' in sys.modules)\n"
    )
    done = without_numpy("-c", code, str(tmp_path / "captures"))
    assert (done.returncode, done.stdout) == (0, "(0,) False\n"), done.stderr
    (bundle,) = (tmp_path / "captures").iterdir()
    part = making.load(bundle / "rank00000.safetensors")
    assert part["micro_batches"][0]["random"]["numpy"] is None
    with_numpy: Run = lambda *arguments: programs.run(arguments)  # noqa: E731
    for run in (without_numpy, with_numpy):
        done = run(*replay(bundle, "Small", "mean_step"))
        assert done.returncode == 0, done.stderr

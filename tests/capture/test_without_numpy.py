"""Bundles that were written where numpy is, replayed where it is not, and the other way round."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from ddpstats._rerun.random_state import RandomState
from tests import programs
from tests.capture import making, replay_models
from tests.capture.making import MODELS, captured
from tests.capture.replay_models import small, toy

FEW = {"x": torch.randn(6, 4, generator=torch.Generator().manual_seed(3)), "y": torch.arange(6)}
NAN = {"x": torch.tensor([[1.0, float("nan"), 2.0, 3.0], [0.0, 1.0, 2.0, 3.0]])}
ROOT = str(Path(__file__).parents[2])

# Python reads it at its start. The import fails as it does where there is no numpy, for C++ too.
BLOCKER = """
import sys
class _NoNumpy:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "numpy":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, _NoNumpy())
"""


@pytest.fixture
def without_numpy(tmp_path: Path) -> Any:
    """Runs Python where numpy is not: (exit status, stdout, stderr)."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(BLOCKER)

    def run(*args: str) -> tuple[int, str, str]:
        paths = os.pathsep.join([str(site), ROOT])
        environment = {**os.environ, "PYTHONPATH": paths, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *args]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, cwd=ROOT, env=environment, check=False
        )
        return done.returncode, done.stdout, done.stderr

    return run


def replayed(bundle: Path, model: str, step: str, *args: str) -> list[str]:
    command = ["-m", "ddpstats", "replay", str(bundle), "--model", f"{MODELS}:{model}", "--step", f"{MODELS}:{step}"]
    return [*command, *args]


def test_there_is_no_numpy(without_numpy: Any) -> None:
    code = "import torch\ntry: torch.ones(1).numpy()\nexcept RuntimeError as e: print(e)\nimport numpy"
    status, out, err = without_numpy("-c", code)
    assert (status, out) == (1, "Numpy is not available\n")
    assert "ModuleNotFoundError: No module named 'numpy'" in err


def test_a_good_bundle_is_replayed(tmp_path: Path, without_numpy: Any) -> None:
    """Nothing can draw from numpy's generator there; what the others drew is drawn again."""
    numpy.random.seed(1)  # a program that has not loaded numpy.random keeps nothing of it
    assert RandomState.take(torch.device("cpu")).numpy is not None
    bundle = captured(tmp_path, toy, replay_models.per_class_step, FEW, FEW)
    status, out, err = without_numpy(*replayed(bundle, "toy", "per_class_step", "--bisect"))
    assert status == 0, err
    for what in ("losses   ", "norms    ", "gradients"):
        assert f"  {what} equal\n" in out
    assert "note: numpy is not installed here" in out
    assert "pip install numpy" in out
    assert "damaged" not in out + err


def test_a_batch_with_arrays_names_the_package(tmp_path: Path, without_numpy: Any) -> None:
    bundle = captured(tmp_path, small, replay_models.mean_step, {**NAN, "lengths": numpy.arange(3)})
    status, _, err = without_numpy(*replayed(bundle, "small", "mean_step"))
    assert status == 2
    assert "batch['lengths'] is an array of numpy, which is not installed here: pip install numpy" in err
    assert "damaged" not in err


def test_a_step_that_needs_numpy_names_the_package(tmp_path: Path, without_numpy: Any) -> None:
    bundle = captured(tmp_path, small, replay_models.numpy_step, {"x": torch.ones(2, 4)})
    status, _, err = without_numpy(*replayed(bundle, "small", "numpy_step"))
    assert status == 2
    assert "ModuleNotFoundError: No module named 'numpy'" in err
    assert "pip install numpy" in err
    assert "damaged" not in err


def test_a_bundle_that_was_written_without_numpy(
    tmp_path: Path, without_numpy: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    code = (
        "import sys, torch, ddpstats\n"
        f"from {MODELS} import small, mean_step\n"
        "model = small()\n"
        "with ddpstats.NaNCapture(sys.argv[1], model=model) as capture:\n"
        "    with capture.micro_batch({'x': torch.full((2, 4), torch.nan)}) as kept:\n"
        "        kept.loss = mean_step(model, kept.batch)\n"
        "        kept.loss.backward()\n"
        "    print(capture.check().culprit_ranks, 'numpy' in sys.modules)\n"
    )
    status, out, err = without_numpy("-c", code, str(tmp_path / "captures"))
    assert (status, out) == (0, "(0,) False\n"), err
    (bundle,) = (tmp_path / "captures").iterdir()
    part = torch.load(bundle / "rank00000.pt", weights_only=True)
    assert part["micro_batches"][0]["random"]["numpy"] is None
    for run in (without_numpy, _with_numpy):
        status, out, err = run(*replayed(bundle, "small", "mean_step"))
        assert status == 0, err
        assert "note: numpy" not in out


def _with_numpy(*args: str) -> tuple[int, str, str]:
    done = programs.run(args, timeout=120)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("key", [torch.zeros(3), torch.zeros(624) - 1, None, [1] * 624], ids=range(4))
def test_a_state_of_numpy_that_is_none_is_still_damaged(tmp_path: Path, key: Any) -> None:
    numpy.random.seed(1)
    bundle = captured(tmp_path, small, replay_models.mean_step, NAN)
    part = torch.load(bundle / "rank00000.pt", weights_only=True)
    part["micro_batches"][0]["random"]["numpy"]["key"] = key
    making.rewrite_part(bundle, "rank00000.pt", part)
    status, _, err = _with_numpy(*replayed(bundle, "small", "mean_step"))
    assert status == 2
    assert "the random state is not one" in err

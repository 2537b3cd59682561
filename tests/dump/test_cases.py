"""The two examples of docs/dumps.md, a wrong mask and a memory stomp, are diagnosed by the verbs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from examples import attention_mask, memory_stomp
from tests import programs
from tests.dump.verbs import run_json, run_verb

ROOT = Path(__file__).resolve().parents[2]


def run_example(name: str, *arguments: str) -> str:
    done = programs.run([str(ROOT / "examples" / name), *arguments], timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- an attention mask of the wrong shape -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def overflow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("case") / "wrong"
    output = run_example("attention_mask.py", str(path), "--mask", "wrong")
    assert "norm of the gradients nan" in output
    assert f"now: ddpstats nan-origin {path}" in output
    return path


@pytest.mark.slow
def test_attention_that_makes_gradients_grow_is_named_with_its_line(overflow: Path) -> None:
    code, text = run_verb("nan-origin", overflow)
    assert code == 1
    assert "It grew until it overflowed: Module FusedAttention (backward) makes it larger in " in text
    assert "Module.layers.7.core.FusedAttention.backward.0  " in text
    assert "look at how Module FusedAttention is called (arguments, masks, scales)" in text
    (origin,) = run_json("nan-origin", overflow)[1]["origins"]
    assert origin["verdict"] == f"{origin['name']} made the first infinity: its inputs are finite"
    assert 1e4 < origin["growth"]["ratio"] < 1e8
    assert "attention_mask.py" in origin["stack"][0]


@pytest.mark.slow
def test_right_mask_has_no_origin(tmp_path: Path) -> None:
    assert attention_mask.train(tmp_path, "right") < 10
    code, text = run_verb("nan-origin", tmp_path)
    assert code == 0
    assert "Nothing found: every" in text


# -- memory that is given out while it is in use ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def stomped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("case")
    output = run_example("memory_stomp.py", str(root / "bad"), "--outcome", "bad")
    assert "ddpstats compare BAD GOOD" in output
    memory_stomp.train(root / "good", is_safe=True)
    return root / "bad", root / "good"


def test_overwritten_range_is_named(stomped: tuple[Path, Path]) -> None:
    bad, good = stomped
    code, text = run_verb("compare", bad, good)
    assert code == 1
    assert "Torch.split.0.backward" in text
    assert "contiguous, 2,048 elements = 8 KiB" in text


def test_tensors_written_and_read_at_one_address_differ(stomped: tuple[Path, Path]) -> None:
    names = ["Torch.split.0.backward.input.1", "Functional.layer_norm.1.backward.output.0"]
    assert f"--tensor {' '.join(names)}\n" in (memory_stomp.__doc__ or "")
    bad, good = stomped
    code, text = run_verb("compare", bad, "--tensor", *names)
    assert code == 1
    assert "contiguous, 2,048 elements = 8 KiB" in text
    a, b = re.findall(r" at (0x\w+) in storage", text)
    assert a == b
    assert run_verb("compare", good, "--tensor", *names)[0] == 0


def test_storages_that_share_memory_are_named(stomped: tuple[Path, Path]) -> None:
    bad, good = stomped
    code, text = run_verb("nan-origin", bad)
    assert code == 1
    assert "live storages that share memory" in text
    assert "Functional.layer_norm.1.backward output.0 (storage " in text
    assert " and Tensor.copy_.0.forward input.0 (storage " in text
    assert "share 8,192 bytes on cpu" in text
    assert "the one is still in use at Torch.split.0.backward input.1" in text
    code, text = run_verb("nan-origin", good)
    assert (code, "share memory" in text, "Nothing found" in text) == (0, False, True)

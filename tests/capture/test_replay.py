"""``ddpstats replay``: bundles of steps that were really run, replayed in this process by the command's own `main`."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddpstats import cli
from ddpstats._base.atomic_files import replace_file
from ddpstats.capture._bundle import Bundle
from ddpstats.capture._outcome import _value
from tests.capture import making, replay_models
from tests.capture.making import MODELS, captured
from tests.capture.replay_models import small, toy

FEW = {"x": torch.randn(6, 4, generator=torch.Generator().manual_seed(3)), "y": torch.arange(6)}
NAN = {"x": torch.tensor([[1.0, float("nan"), 2.0, 3.0], [0.0, 1.0, 2.0, 3.0]])}
FINE = {"x": torch.ones(2, 4)}

Replay = Callable[..., tuple[int, str, str]]


@pytest.fixture
def replay(capsys: pytest.CaptureFixture[str]) -> Replay:
    """(exit status, stdout, stderr)"""

    def run(bundle: Path, model: str, step: str, *args: str) -> tuple[int, str, str]:
        command = ["replay", str(bundle), "--model", f"{MODELS}:{model}", "--step", f"{MODELS}:{step}", *args]
        capsys.readouterr()  # of the step that was captured
        status = cli.main(command)
        assert not dist.is_initialized()
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return run


def test_a_class_that_does_not_occur(tmp_path: Path, replay: Replay) -> None:
    """The seed's own case: batch normalization, dropout, two micro-batches, bit for bit."""
    bundle = captured(tmp_path, toy, replay_models.per_class_step, FEW, FEW)
    torch.manual_seed(99)
    random.seed(99)
    status, out, _ = replay(bundle, "toy", "per_class_step", "--repeat", "2")
    assert status == 0, out
    assert "reproduced: gradients of 6 of 6 parameters not finite" in out
    assert "not finite now:  inner.0.weight, inner.0.bias, inner.1.weight, inner.1.bias, head.weight and 1 more" in out
    for what in ("losses   ", "norms    ", "gradients"):
        assert f"  {what} equal\n" in out
    assert "reproduced in 2 of 2 runs; the runs are equal in every bit" in out
    assert "2 micro-batches, captured on cpu, replayed on cpu" in out


def test_as_json(tmp_path: Path, replay: Replay) -> None:
    bundle = captured(tmp_path, small, replay_models.printing_step, NAN)
    status, out, err = replay(bundle, "small", "printing_step", "--json")
    found = json.loads(out)
    assert (status, found["reproduced"], found["rank"], found["losses"]) == (0, True, 0, ["nan"])
    assert found["bit_for_bit"] == {"losses": "equal", "norms": "equal", "gradients": "equal"}
    assert found["nonfinite_then"] == found["nonfinite_now"] == ["layer.weight", "layer.bias"]
    assert (found["bisect"], found["error_now"], found["runs_identical"]) == (None, None, True)
    assert "a step that prints" in err


def test_what_a_step_writes_past_python_does_not_spoil_the_json(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bundle = captured(tmp_path, small, replay_models.mean_step, NAN)
    command = ["replay", str(bundle), "--model", f"{MODELS}:small", "--step", f"{MODELS}:raw_printing_step", "--json"]
    assert cli.main(command) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["reproduced"]
    assert "by number" in err
    assert "in C" in err


@pytest.mark.parametrize(
    ("factory", "replayed"), [(replay_models.compiled, "toy"), (toy, "compiled")], ids=["then", "now"]
)
def test_a_module_that_was_compiled_only_then_or_only_now(
    tmp_path: Path, replay: Replay, factory: Callable[[], torch.nn.Module], replayed: str
) -> None:
    def prepare(model: torch.nn.Module) -> None:
        inner = model.get_submodule("_orig_mod") if factory is replay_models.compiled else model
        inner.get_submodule("inner").eval()
        inner.get_parameter("head.bias").requires_grad_(False)

    bundle = captured(tmp_path, factory, replay_models.mean_step, FEW, prepare=prepare)
    out = replay(bundle, replayed, "mean_step")[1]
    for what in ("losses   ", "norms    ", "gradients"):
        assert f"  {what} equal" in out, out


def test_a_loss_of_several_numbers_is_shown_by_its_shape() -> None:
    assert _value(torch.zeros(3)) == "a tensor of shape (3,)"
    assert _value(torch.tensor([0.5])) == "0.5"


def test_writing_a_file_leaves_the_umask_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the whole process's: for a moment, other threads' files would be open to everybody."""
    monkeypatch.setattr(os, "umask", lambda mask: pytest.fail("the umask was set"))
    replace_file(tmp_path / "file", lambda file: file.write(b""))


def test_random_numbers_are_those_of_the_capture(tmp_path: Path, replay: Replay) -> None:
    """A loss that is finite, so that its bits tell."""
    bundle = captured(tmp_path, small, replay_models.random_step, FINE, FINE, seed=5)
    random.seed(1)
    torch.manual_seed(1)
    status, out, _ = replay(bundle, "small", "random_step")
    assert status == 1
    assert "not reproduced: no gradient not finite" in out
    assert "  losses    equal\n" in out
    assert "  gradients equal" in out


def test_what_is_not_equal_is_said(tmp_path: Path, replay: Replay) -> None:
    bundle = captured(tmp_path, small, replay_models.mean_step, FINE)
    part = torch.load(bundle / "rank00000.pt", weights_only=True)
    part["micro_batches"][0]["norms"][1] *= 2
    part["micro_batches"][0]["loss"] = torch.tensor(-0.5)
    part["gradients"]["layer.bias"][0] += 1
    making.rewrite_part(bundle, "rank00000.pt", part)
    out = replay(bundle, "small", "mean_step")[1]
    assert "losses    differ: micro-batch 0: -0.5 then, " in out
    assert "norms     differ: micro-batch 0, 1 of 2 parameters, first layer.bias: " in out
    assert "gradients differ: layer.bias" in out


def test_modes_and_frozen_parameters_are_as_in_the_capture(tmp_path: Path, replay: Replay) -> None:
    def prepare(model: torch.nn.Module) -> None:
        model.get_submodule("inner").eval()
        model.get_parameter("head.bias").requires_grad_(False)

    bundle = captured(tmp_path, toy, replay_models.mean_step, FEW, prepare=prepare)
    out = replay(bundle, "toy", "mean_step")[1]
    assert "  norms     equal" in out
    assert "  gradients equal" in out


def test_buffers_are_those_before_the_step(tmp_path: Path, replay: Replay) -> None:
    """In training mode the forward pass changes them: the second run must not begin with what the first one left."""

    def prepare(model: torch.nn.Module) -> None:
        model.get_buffer("inner.1.running_mean").fill_(3.0)

    def eval_mode(model: torch.nn.Module) -> None:
        prepare(model)
        model.eval()

    bundle = captured(tmp_path, toy, replay_models.mean_step, FEW, prepare=eval_mode)
    out = replay(bundle, "toy", "mean_step", "--repeat", "2")[1]
    assert "  losses    equal" in out
    assert "the runs are equal in every bit" in out


def test_a_scale(tmp_path: Path, replay: Replay) -> None:
    bundle = captured(tmp_path, small, replay_models.mean_step, FINE, scale=1024.0)
    out = replay(bundle, "small", "mean_step")[1]
    assert "  norms     equal" in out
    assert "  losses    equal" in out


def test_autocast_around_the_model_and_precisions(tmp_path: Path, replay: Replay) -> None:
    bundle = captured(tmp_path, small, replay_models.mean_step, FEW, autocast=torch.bfloat16)
    assert Bundle.open(bundle).rank_part(0).micro_batches[0].autocast is not None
    captured_loss = losses(replay(bundle, "small", "mean_step", "--json"))
    wide = losses(replay(bundle, "small", "mean_step", "--json", "--precision", "fp32"))
    wider = losses(replay(bundle, "small", "mean_step", "--json", "--precision", "fp64"))
    narrow = losses(replay(bundle, "small", "mean_step", "--json", "--precision", "amp", "--amp-dtype", "float16"))
    assert len({captured_loss, wide, wider, narrow}) == 4
    out = replay(bundle, "small", "mean_step", "--precision", "fp64")[1]
    assert "losses    not compared: --precision fp64" in out


def losses(result: tuple[int, str, str]) -> str:
    return str(json.loads(result[1])["losses"])


def test_autocast_inside_the_step_is_switched_off_for_fp64(tmp_path: Path, replay: Replay) -> None:
    bundle = captured(tmp_path, small, replay_models.autocast_step, FINE)
    own = losses(replay(bundle, "small", "autocast_step", "--json"))
    plain = losses(replay(bundle, "small", "mean_step", "--json", "--precision", "fp64"))
    assert losses(replay(bundle, "small", "autocast_step", "--json", "--precision", "fp64")) == plain != own


def test_a_race(tmp_path: Path, replay: Replay) -> None:
    replay_models.flaky_calls.clear()
    bundle = captured(tmp_path, small, replay_models.flaky_step, FINE)
    status, out, _ = replay(bundle, "small", "flaky_step", "--repeat", "4")
    assert status == 0
    assert "reproduced in 2 of 4 runs; the result differs between runs: a race or transient fault" in out


# -- ranks and reasons ------------------------------------------------------------------------------------------------


def test_other_ranks_are_played_by_this_one(tmp_path: Path, replay: Replay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    bundle = captured(tmp_path, small, replay_models.mean_step, NAN, rank=1, world_size=4)
    status, out, err = replay(bundle, "small", "distributed_step")
    assert status == 2  # NaN is not equal to itself, so that the step's own assertion fails
    assert "AssertionError" in err
    bundle = captured(tmp_path / "fine", small, replay_models.mean_step, FINE, rank=1, world_size=4)
    for _ in range(2):
        status, out, err = replay(bundle, "small", "distributed_step", "--repeat", "2")
        assert status == 1, err
        assert "3 collectives were replaced by this rank's own values (all_gather 1, all_reduce 1, barrier 1)" in out


def test_batch_norm_of_all_ranks_on_a_machine_without_them(tmp_path: Path, replay: Replay) -> None:
    torch.manual_seed(1)
    model = replay_models.synchronized()
    model_part = making.parameters_of(model)
    part = making.run_and_keep(model.eval(), replay_models.mean_step, [FEW], world_size=2)
    bundle = making.write_bundle(tmp_path, {0: {**part, "eval_modules": []}}, model_part)
    status, out, err = replay(bundle, "synchronized", "mean_step")
    assert status == 1, err
    assert "note: 1 SyncBatchNorm module normalizes over this rank's batch alone" in out


def test_a_loss_without_bad_gradients(tmp_path: Path, replay: Replay) -> None:
    bundle = captured(tmp_path, small, replay_models.empty_mean_step, FINE)
    status, out, _ = replay(bundle, "small", "empty_mean_step")
    assert status == 1
    assert "not reproduced: no gradient not finite, but a loss is" in out


def test_send_is_an_error(tmp_path: Path, replay: Replay) -> None:
    bundle = captured(tmp_path, small, replay_models.mean_step, NAN, rank=1, world_size=2)
    status, _, err = replay(bundle, "small", "sending_step")
    assert status == 2
    assert "the step calls send: a replay has one rank only" in err


def two_ranks(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    model = small()
    model_part = making.parameters_of(model)
    parts = {}
    for rank, batch in enumerate([FINE, NAN]):
        parts[rank] = making.run_and_keep(model, replay_models.mean_step, [batch], rank=rank, world_size=2)
        model.zero_grad()
    return making.write_bundle(tmp_path, parts, model_part, culprits=[1])


def test_the_culprit_is_chosen(tmp_path: Path, replay: Replay) -> None:
    bundle = two_ranks(tmp_path)
    status, out, _ = replay(tmp_path, "small", "mean_step")
    assert status == 0
    assert "rank 1 of 2" in out
    assert "holds 1 bundle; this is the newest complete one" in out
    status, out, _ = replay(bundle, "small", "mean_step", "--rank", "0")
    assert status == 1
    assert "rank 0 is none of the culprits (1): its own gradients were finite" in out
    status, _, err = replay(bundle, "small", "mean_step", "--rank", "7")
    assert status == 2
    assert "has no part of rank 7" in err
    assert replay(bundle, "small", "mean_step", "--rank", "first")[0] == 2


def test_an_overflow_of_the_sum(tmp_path: Path, replay: Replay) -> None:
    bundle = captured(tmp_path, small, replay_models.mean_step, FINE, reason="overflow", culprits=[], world_size=2)
    status, out, _ = replay(bundle, "small", "mean_step")
    assert status == 0
    assert "no rank alone shows it; this rank's norms are as captured" in out


def test_an_exception(tmp_path: Path, replay: Replay) -> None:
    bundle = captured(tmp_path, small, replay_models.raising_step, NAN, reason="exception", raises=True)
    status, out, _ = replay(bundle, "small", "raising_step")
    assert status == 0
    assert "reproduced: the capture raised ZeroDivisionError: no class" in out
    assert "raised now: ZeroDivisionError: no class" in out
    status, out, _ = replay(bundle, "small", "mean_step")
    assert (status, out.count("not reproduced: the capture raised")) == (1, 1)
    bundle = captured(tmp_path / "other", small, replay_models.raising_step, FINE, reason="exception", raises=True)
    part = torch.load(bundle / "rank00000.pt", weights_only=True)
    making.rewrite_part(bundle, "rank00000.pt", {**part, "error": "ZeroDivisionError: no class"})
    status, _, err = replay(bundle, "small", "raising_step")
    assert status == 2
    assert "the capture raised ZeroDivisionError" in err
    assert "KeyError: 'another'" in err


# -- what cannot be run -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "step", "said"),
    [
        ("toy", "mean_step", "captured, and not in the module: layer.weight, layer.bias"),
        ("no_module", "mean_step", "returned a str, not a torch.nn.Module"),
        ("failing_factory", "mean_step", "FileNotFoundError: the configuration is not here"),
        ("nothing", "mean_step", "has no 'nothing'"),
        ("CLASSES", "mean_step", "that is a int, which cannot be called"),
        ("small", "dict_step", "it returned a dict: return its entry 'loss'"),
        ("small", "tuple_step", "it returned a tuple: return its first element"),
        ("small", "raising_step", "--step raised what the capture did not, in micro-batch 0"),
        ("small", "exiting_step", "--step ended the process, with status 0"),
    ],
)
def test_what_the_user_gave_wrongly(tmp_path: Path, replay: Replay, model: str, step: str, said: str) -> None:
    bundle = captured(tmp_path, small, replay_models.mean_step, FINE)
    status, out, err = replay(bundle, model, step)
    assert (status, out) == (2, "")
    assert said in err
    assert "ddpstats/capture" not in err
    assert "ddpstats/_rerun" not in err


def test_a_traceback_is_of_the_users_frames(tmp_path: Path, replay: Replay) -> None:
    bundle = captured(tmp_path, small, replay_models.mean_step, FINE)
    err = replay(bundle, "small", "raising_step")[2]
    assert 'replay_models.py", line' in err
    assert 'raise KeyError("another")' in err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--repeat", "0"], "--repeat 0: at least one run"),
        (["--device", "nonsense"], "--device nonsense: "),
        (["--amp-dtype", "float16"], "needs --precision amp"),
        (["--model", "no_such_module_of_mine:x"], "No module named 'no_such_module_of_mine'"),
        (["--model", "module"], "a module and a name in it"),
    ],
)
def test_arguments_that_cannot_work(tmp_path: Path, replay: Replay, args: list[str], said: str) -> None:
    bundle = captured(tmp_path, small, replay_models.mean_step, FINE)
    status, _, err = replay(bundle, "small", "mean_step", *args)
    assert status == 2
    assert said in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, so that --device cuda works")
def test_no_such_device(tmp_path: Path, replay: Replay) -> None:
    bundle = captured(tmp_path, small, replay_models.mean_step, FINE)
    assert "this machine has none that torch can use" in replay(bundle, "small", "mean_step", "--device", "cuda")[2]
    part = torch.load(bundle / "rank00000.pt", weights_only=True)
    making.rewrite_part(bundle, "rank00000.pt", {**part, "device": "cuda:3", "norm": "inf"})
    out = replay(bundle, "small", "mean_step")[1]
    assert "captured on cuda:3, replayed on cpu: last bits differ" in out
    assert "not compared: inf-norms were captured, cpu measures others" in out


def test_shapes_that_differ(tmp_path: Path, replay: Replay) -> None:
    bundle = captured(tmp_path, small, replay_models.mean_step, FINE)
    content = torch.load(bundle / "model.pt", weights_only=True)
    content["parameters"]["layer.bias"] = torch.zeros(4)
    making.rewrite_part(bundle, "model.pt", content)
    err = replay(bundle, "small", "mean_step")[2]
    assert "other shapes: layer.bias is (3,), captured (4,)" in err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m.update(batch=None, batch_missing="store_batch=False"), "is not in the bundle: store_batch"),
        (lambda m: m.update(batch={"kind": "evil"}), "kind 'evil' is not one that ddpstats writes"),
        (lambda m: m.update(random={"python": 3}), "the random state is not one"),
        (lambda m: m["random"].update(torch_cpu=torch.zeros(3)), "the random state"),
        (lambda m: m["random"].update(torch_cpu=[1]), "the random state"),
    ],
    ids=range(5),
)
def test_a_micro_batch_that_is_none(
    tmp_path: Path, replay: Replay, change: Callable[[dict[str, Any]], object], said: str
) -> None:
    bundle = captured(tmp_path, small, replay_models.mean_step, FINE)
    part = torch.load(bundle / "rank00000.pt", weights_only=True)
    change(part["micro_batches"][0])
    making.rewrite_part(bundle, "rank00000.pt", part)
    status, _, err = replay(bundle, "small", "mean_step")
    assert status == 2
    assert said in err


def test_a_rank_without_a_batch(tmp_path: Path, replay: Replay) -> None:
    bundle = captured(tmp_path, small, replay_models.mean_step)
    assert "rank 0 had no batch in this step" in replay(bundle, "small", "mean_step")[2]


def test_a_batch_that_was_changed_is_a_note(tmp_path: Path, replay: Replay) -> None:
    bundle = captured(tmp_path, small, replay_models.mean_step, NAN)
    part = torch.load(bundle / "rank00000.pt", weights_only=True)
    part["micro_batches"][0]["changed"] = ["batch['x']"]
    making.rewrite_part(bundle, "rank00000.pt", part)
    status, out, _ = replay(bundle, "small", "mean_step")
    assert status == 0
    assert "note: micro-batch 0: batch['x'] was changed in place during the step" in out


def test_settings_of_this_process_stay(tmp_path: Path, replay: Replay) -> None:
    before = torch.get_num_threads(), torch.get_default_dtype(), list(sys.path)
    bundle = captured(tmp_path, small, replay_models.mean_step, NAN)
    part = torch.load(bundle / "rank00000.pt", weights_only=True)
    part["environment"].update(threads=1, default_dtype="torch.float64", matmul_precision="high")
    making.rewrite_part(bundle, "rank00000.pt", part)
    assert replay(bundle, "small", "mean_step")[0] == 0
    assert (torch.get_num_threads(), torch.get_default_dtype(), list(sys.path)) == before
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_process_of_its_own_with_the_users_module_in_its_directory(tmp_path: Path) -> None:
    bundle = captured(tmp_path, small, replay_models.mean_step, NAN)
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "class Small(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Linear(4, 3)\n"
        "def step(model, batch):\n"
        "    return model.layer(batch['x']).square().mean()\n"
    )
    command = [sys.executable, "-m", "ddpstats", "replay", bundle.name, "--model", "mine:Small", "--step", "mine:step"]
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [*command, "--json", "--bisect"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env={"PYTHONPATH": root, "PATH": "/usr/bin"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["bit_for_bit"] == {"losses": "equal", "norms": "equal", "gradients": "equal"}
    assert found["bisect"]["origin"]["what"] == "batch['x']"


def test_help_does_not_import_torch() -> None:
    code = (
        "import contextlib, sys, ddpstats.cli\n"
        "with contextlib.suppress(SystemExit): ddpstats.cli.main(['replay', '--help'])\n"
        "print({'torch', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.endswith("set()\n"), done.stdout + done.stderr

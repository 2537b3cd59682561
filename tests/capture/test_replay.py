"""``ddpstats replay`` runs a captured step again, in one process, and says whether it is the same to the bit.

Bundles are of steps that were really run here; the command's own `main` replays them.
"""

from __future__ import annotations

import json
import os
import random
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddpstats import cli
from ddpstats.capture import replay as replays
from ddpstats.capture.bundle import Bundle
from tests import programs
from tests.capabilities import needs_guard
from tests.capture import making, replay_models
from tests.capture.making import MODELS, captured
from tests.capture.replay_models import Small, Toy

FEW = {"x": torch.randn(6, 4, generator=torch.Generator().manual_seed(3)), "y": torch.arange(6)}
NAN = {"x": torch.tensor([[1.0, float("nan"), 2.0, 3.0], [0.0, 1.0, 2.0, 3.0]])}
FINE = {"x": torch.ones(2, 4)}

Replay = Callable[..., tuple[int, str, str]]


@pytest.fixture
def replay(capsys: pytest.CaptureFixture[str]) -> Replay:
    """Return a function that replays a bundle: (exit status, stdout, stderr)."""

    def run(bundle: Path, model: str = "Small", step: str = "mean_step", *args: str) -> tuple[int, str, str]:
        command = ["replay", str(bundle), "--model", f"{MODELS}:{model}", "--step", f"{MODELS}:{step}", *args]
        capsys.readouterr()  # of the step that was captured
        status = cli.main(command)
        assert not dist.is_initialized()
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return run


def change_part(bundle: Path, change: Callable[[dict[str, Any]], object], name: str = "rank00000.safetensors") -> None:
    content = making.load(bundle / name)
    change(content)
    making.rewrite_part(bundle, name, content)


def test_a_class_that_does_not_occur_is_replayed_bit_for_bit(tmp_path: Path, replay: Replay) -> None:
    """The case has batch normalization, dropout and two micro-batches."""
    bundle = captured(tmp_path, Toy, replay_models.per_class_step, FEW, FEW)
    torch.manual_seed(99)
    random.seed(99)
    status, out, _ = replay(bundle, "Toy", "per_class_step", "--repeat", "2")
    assert status == 0, out
    assert "reproduced: gradients of 6 of 6 parameters not finite" in out
    assert "not finite now:  inner.0.weight, inner.0.bias, inner.1.weight, inner.1.bias, head.weight and 1 more" in out
    for what in ("losses   ", "norms    ", "gradients"):
        assert f"  {what} equal\n" in out
    assert "reproduced in 2 of 2 runs; the runs are equal in every bit" in out
    assert "2 micro-batches, captured on cpu, replayed on cpu" in out


def test_json_has_the_result_and_what_the_step_prints_goes_to_stderr(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The step prints past Python's own stdout, too: by number, and in C's buffer."""
    bundle = captured(tmp_path, Small, replay_models.mean_step, NAN)
    names = ["--model", f"{MODELS}:Small", "--step", f"{MODELS}:printing_step"]
    assert cli.main(["replay", str(bundle), *names, "--json"]) == 0
    out, err = capfd.readouterr()
    result = json.loads(out)
    assert (result["reproduced"], result["rank"], result["losses"]) == (True, 0, ["nan"])
    assert result["bit_for_bit"] == {"losses": "equal", "norms": "equal", "gradients": "equal"}
    assert result["nonfinite_then"] == result["nonfinite_now"] == ["layer.weight", "layer.bias"]
    assert (result["bisect"], result["error_now"], result["runs_identical"]) == (None, None, True)
    assert all(text in err for text in ("by print", "by number", "in C"))


# -- what a replay restores -------------------------------------------------------------------------------------------


def eval_and_frozen(model: nn.Module) -> None:
    inner = model.get_submodule("_orig_mod") if isinstance(model, replay_models.Compiled) else model
    inner.get_submodule("inner").eval()
    inner.get_parameter("head.bias").requires_grad_(False)


def eval_with_other_buffers(model: nn.Module) -> None:
    model.eval()
    model.get_buffer("inner.1.running_mean").fill_(3.0)


@pytest.mark.parametrize(
    ("factory", "replayed", "step", "how"),
    [
        (Small, "Small", "random_step", {"seed": 5}),
        (Toy, "Toy", "mean_step", {"prepare": eval_and_frozen}),
        (Toy, "Toy", "mean_step", {"prepare": eval_with_other_buffers}),
        (Toy, "Toy", "mean_step", {}),
        (Small, "Small", "mean_step", {"scale": 1024.0}),
        (replay_models.Compiled, "Toy", "mean_step", {"prepare": eval_and_frozen}),
        (Toy, "Compiled", "mean_step", {"prepare": eval_and_frozen}),
        (replay_models.Replicated, "Replicated", "mean_step", {"world_size": 2}),
    ],
    ids=["random", "modes", "buffers", "buffers that change", "scale", "compiled then", "compiled now", "replicated"],
)
def test_a_finite_step_is_replayed_bit_for_bit(
    tmp_path: Path, replay: Replay, factory: Callable[[], nn.Module], replayed: str, step: str, how: dict[str, Any]
) -> None:
    """Random numbers, modes, frozen parameters, buffers and the scale are those of the capture, in each run."""
    bundle = captured(tmp_path, factory, getattr(replay_models, step), FEW, FEW, **how)
    random.seed(1)
    torch.manual_seed(1)
    status, out, _ = replay(bundle, replayed, step, "--repeat", "2")
    assert status == 1
    assert "not reproduced: gradients of 0 of " in out
    for what in ("losses   ", "norms    ", "gradients"):
        assert f"  {what} equal" in out, out
    assert "the runs are equal in every bit" in out


def test_what_is_not_equal_is_listed(tmp_path: Path, replay: Replay) -> None:
    def change(part: dict[str, Any]) -> None:
        part["micro_batches"][0]["norms"][1] *= 2
        part["micro_batches"][0]["loss"] = torch.tensor(-0.5)
        part["gradients"]["layer.bias"][0] += 1

    bundle = captured(tmp_path, Small, replay_models.mean_step, FINE)
    change_part(bundle, change)
    out = replay(bundle)[1]
    assert "losses    differ: micro-batch 0: -0.5 then, " in out
    assert "norms     differ: micro-batch 0: layer.bias: " in out
    assert "gradients differ: layer.bias" in out


def test_precision_replaces_the_captured_autocast(tmp_path: Path, replay: Replay) -> None:
    bundle = captured(tmp_path, Small, replay_models.mean_step, FEW, autocast=torch.bfloat16)
    assert Bundle.open(bundle).rank_part(0).micro_batches[0].autocast is not None
    precisions = [[], ["fp32"], ["fp64"], ["amp", "--amp-dtype", "float16"]]
    options = [["--precision", *precision] if precision else [] for precision in precisions]
    assert len({losses(replay(bundle, "Small", "mean_step", "--json", *option)) for option in options}) == 4
    assert "losses    not compared: --precision fp64" in replay(bundle, "Small", "mean_step", *options[2])[1]


def losses(result: tuple[int, str, str]) -> str:
    return str(json.loads(result[1])["losses"])


def test_autocast_inside_the_step_is_switched_off_for_fp64(tmp_path: Path, replay: Replay) -> None:
    bundle = captured(tmp_path, Small, replay_models.autocast_step, FINE)
    own = losses(replay(bundle, "Small", "autocast_step", "--json"))
    plain = losses(replay(bundle, "Small", "mean_step", "--json", "--precision", "fp64"))
    assert losses(replay(bundle, "Small", "autocast_step", "--json", "--precision", "fp64")) == plain != own


def test_a_result_that_differs_between_runs_is_a_race(tmp_path: Path, replay: Replay) -> None:
    replay_models.flaky_calls.clear()
    bundle = captured(tmp_path, Small, replay_models.flaky_step, FINE)
    status, out, _ = replay(bundle, "Small", "flaky_step", "--repeat", "4")
    assert status == 0
    assert "reproduced in 2 of 4 runs; the result differs between runs: a race or transient fault" in out


def test_runs_after_the_first_one_are_let_go_of_before_the_next(
    tmp_path: Path, replay: Replay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each holds the gradients of all parameters, on the device."""
    outcomes, alive = list[weakref.ref[Any]](), list[int]()

    def run(self: Any, search: Any = None) -> Any:
        alive.append(sum(outcome() is not None for outcome in outcomes))
        outcome = run_once(self, search)
        outcomes.append(weakref.ref(outcome))
        return outcome

    run_once = replays.Replay.run
    monkeypatch.setattr(replays.Replay, "run", run)
    bundle = captured(tmp_path, Small, replay_models.mean_step, NAN)
    status, out, _ = replay(bundle, "Small", "mean_step", "--repeat", "4")
    assert "reproduced in 4 of 4 runs; the runs are equal in every bit" in out
    assert (status, alive) == (0, [0, 1, 1, 1])


def test_settings_of_this_process_stay(tmp_path: Path, replay: Replay) -> None:
    before = torch.get_num_threads(), torch.get_default_dtype(), list(sys.path)
    bundle = captured(tmp_path, Small, replay_models.mean_step, NAN)
    settings = {"threads": 1, "default_dtype": "torch.float64", "matmul_precision": "high"}
    change_part(bundle, lambda part: part["environment"].update(settings))
    assert replay(bundle)[0] == 0
    assert (torch.get_num_threads(), torch.get_default_dtype(), list(sys.path)) == before
    assert torch.get_float32_matmul_precision() == "highest"


# -- ranks and reasons ------------------------------------------------------------------------------------------------


@needs_guard  # whose operators name their reduction
@pytest.mark.parametrize(("rank", "ranks"), [(1, None), (5, (4, 5, 6, 7))], ids=["all ranks", "a group"])
def test_other_ranks_are_played_by_this_one(
    tmp_path: Path, replay: Replay, monkeypatch: pytest.MonkeyPatch, rank: int, ranks: tuple[int, ...] | None
) -> None:
    monkeypatch.setenv("RANK", "7")
    bundle = captured(tmp_path, Small, replay_models.mean_step, FINE, rank=rank, world_size=4, ranks=ranks)
    for _ in range(2):
        status, out, err = replay(bundle, "Small", "distributed_step", "--repeat", "2", "--bisect")
        assert status == 1, err
        assert "collectives were replaced by this rank's own values (all_gather 3, " in out
        assert (
            "all_reduce 6, all_to_all 1, all_to_all_single 1, broadcast 1, reduce_scatter 1, reduce_scatter_tensor 1)"
            in out
        )
        assert "bisect: every loss and every gradient was finite" in out
        assert os.environ["RANK"] == "7"
    status, _, err = replay(bundle, "Small", "sending_step")
    assert status == 2
    assert "the step calls send: a replay has one rank only" in err


def test_batch_norm_of_all_ranks_on_a_machine_without_them(tmp_path: Path, replay: Replay) -> None:
    torch.manual_seed(1)
    model = replay_models.Synchronized()
    model_part = making.parameters_of(model)
    part = making.run_and_keep(model.eval(), replay_models.mean_step, [FEW], world_size=2)
    bundle = making.write_bundle(tmp_path, {0: {**part, "eval_modules": []}}, model_part)
    status, out, err = replay(bundle, "Synchronized")
    assert status == 1, err
    assert "note: SyncBatchNorm normalizes over this rank's batch alone" in out


def test_a_loss_without_bad_gradients_is_not_reproduced(tmp_path: Path, replay: Replay) -> None:
    bundle = captured(tmp_path, Small, replay_models.empty_mean_step, FINE)
    status, out, _ = replay(bundle, "Small", "empty_mean_step")
    assert status == 1
    assert "losses now:      nan" in out


def test_the_culprit_is_replayed_unless_another_rank_is_asked_for(tmp_path: Path, replay: Replay) -> None:
    torch.manual_seed(1)
    model = Small()
    model_part = making.parameters_of(model)
    parts = {}
    for rank, batch in enumerate([FINE, NAN]):
        parts[rank] = making.run_and_keep(model, replay_models.mean_step, [batch], rank=rank, world_size=2)
        model.zero_grad()
    bundle = making.write_bundle(tmp_path, parts, model_part, culprits=[1])
    status, out, _ = replay(tmp_path)
    assert status == 0
    assert "rank 1 of 2" in out
    assert "holds 1 bundle; this is the newest complete one" in out
    status, out, _ = replay(bundle, "Small", "mean_step", "--rank", "0")
    assert status == 1
    assert "rank 0 is not a culprit (1): its own gradients were finite" in out
    status, _, err = replay(bundle, "Small", "mean_step", "--rank", "7")
    assert status == 2
    assert "has no part of rank 7" in err
    assert replay(bundle, "Small", "mean_step", "--rank", "first")[0] == 2


def test_an_overflow_of_the_sum_compares_the_norms_of_a_rank(tmp_path: Path, replay: Replay) -> None:
    bundle = captured(tmp_path, Small, replay_models.mean_step, FINE, reason="overflow", culprits=[], world_size=2)
    status, out, _ = replay(bundle)
    assert status == 0
    assert "reproduced: the sum of finite gradients was not finite" in out


def test_an_exception_is_reproduced_by_the_same_error_only(tmp_path: Path, replay: Replay) -> None:
    bundle = captured(tmp_path, Small, replay_models.raising_step, NAN, reason="exception")
    status, out, _ = replay(bundle, "Small", "raising_step")
    assert status == 0
    assert "reproduced: the capture raised ZeroDivisionError: no class" in out
    assert "raised now:      ZeroDivisionError: no class" in out
    status, out, _ = replay(bundle)
    assert (status, out.count("not reproduced: the capture raised")) == (1, 1)
    bundle = captured(tmp_path / "other", Small, replay_models.raising_step, FINE, reason="exception")
    change_part(bundle, lambda part: part.update(error="ZeroDivisionError: no class"))
    status, _, err = replay(bundle, "Small", "raising_step")
    assert status == 2
    assert "the capture raised ZeroDivisionError" in err
    assert "KeyError: 'another'" in err


@pytest.mark.parametrize("device", ["npu:0", "privateuseone", "meta", ""])
def test_a_device_that_torch_cannot_use_here_is_a_note(tmp_path: Path, replay: Replay, device: str) -> None:
    bundle = captured(tmp_path, Small, replay_models.mean_step, NAN)

    def change(part: dict[str, Any]) -> None:
        part.update(device=device, norm="inf")
        for micro in part["micro_batches"]:
            micro["random"].update(device=device, torch_device=torch.zeros(16, dtype=torch.uint8))

    change_part(bundle, change)
    status, out, err = replay(bundle)
    assert (status, err) == (0, "")
    assert f"captured on {device}, replayed on cpu: last bits differ" in out
    assert "not compared: inf-norms were captured, cpu measures others" in out


def test_parameters_of_whole_numbers_are_status_2(tmp_path: Path, replay: Replay) -> None:
    bundle = captured(tmp_path, Small, replay_models.mean_step, NAN)
    weight = torch.zeros(3, 4, dtype=torch.int64)
    change_part(bundle, lambda part: part["parameters"].update({"layer.weight": weight}), "model.safetensors")
    status, _, err = replay(bundle)
    assert status == 2
    assert "--step raised what the capture did not" in err


def test_a_batch_that_was_changed_is_a_note(tmp_path: Path, replay: Replay) -> None:
    bundle = captured(tmp_path, Small, replay_models.mean_step, NAN)
    change_part(bundle, lambda part: part["micro_batches"][0].update(changed=["batch['x']"]))
    status, out, _ = replay(bundle)
    assert status == 0
    assert "note: micro-batch 0: batch['x'] was changed in place" in out


# -- what cannot be run -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["Toy"], "layer.weight: (3, 4) captured, nothing in the module"),
        (["no_module"], "returned a str, not a torch.nn.Module"),
        (["failing_factory"], "FileNotFoundError: the configuration is not here"),
        (["nothing"], "has no function 'nothing'"),
        (["CLASSES"], "has no function 'CLASSES'"),
        (["Small", "dict_step"], "it returned a dict"),
        (["Small", "tuple_step"], "it returned a tuple"),
        (["Small", "raising_step"], "--step raised what the capture did not, in micro-batch 0"),
        (["Small", "raising_step"], 'raise KeyError("another")'),
        (["Small", "exiting_step"], "--step ended the process, with status 0"),
        (["Small", "mean_step", "--repeat", "0"], "--repeat 0: at least one run"),
        (["Small", "mean_step", "--device", "nonsense"], "--device nonsense: "),
        (["Small", "mean_step", "--device", "meta"], "--device meta: torch cannot use it here"),
        (["Small", "mean_step", "--amp-dtype", "float16"], "needs --precision amp"),
        (["Small", "mean_step", "--model", "no_such_module_of_mine:x"], "No module named 'no_such_module_of_mine'"),
        (["Small", "mean_step", "--model", "module"], "a module and a name in it"),
    ],
)
def test_what_the_user_gave_wrongly_is_status_2_without_our_frames(
    tmp_path: Path, replay: Replay, args: list[str], text: str
) -> None:
    bundle = captured(tmp_path, Small, replay_models.mean_step, FINE)
    status, out, err = replay(bundle, *args)
    assert (status, out) == (2, "")
    assert text in err
    assert "ddpstats/capture" not in err
    assert "ddpstats/_rerun" not in err


def _numpy_state(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda micro_batch: micro_batch["random"]["numpy"]["state"].update(changes)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: m.update(batch=None, batch_missing="store_batch=False"), "is not in the bundle: store_batch"),
        (lambda m: m.update(batch={"kind": "evil"}), "kind 'evil' is not one that ddpstats writes"),
        (lambda m: m.update(random={"python": 3}), "the random state is not one"),
        (lambda m: m["random"].update(torch_cpu=torch.zeros(3)), "the random state"),
        (_numpy_state(key=[1] * 3), "the random state is not one"),
        (_numpy_state(pos=625), "the random state is not one"),  # numpy would read beyond its memory
    ],
    ids=range(6),
)
def test_a_micro_batch_that_is_none_is_status_2(
    tmp_path: Path, replay: Replay, change: Callable[[dict[str, Any]], object], text: str
) -> None:
    numpy.random.seed(1)
    bundle = captured(tmp_path, Small, replay_models.mean_step, FINE)
    change_part(bundle, lambda part: change(part["micro_batches"][0]))
    status, _, err = replay(bundle)
    assert status == 2
    assert text in err


def test_a_rank_without_a_batch_and_other_shapes_are_status_2(tmp_path: Path, replay: Replay) -> None:
    bundle = captured(tmp_path, Small, replay_models.mean_step)
    assert "rank 0 had no batch in this step" in replay(bundle)[2]
    bundle = captured(tmp_path / "shapes", Small, replay_models.mean_step, FINE)
    change_part(
        bundle, lambda content: content["parameters"].update({"layer.bias": torch.zeros(4)}), "model.safetensors"
    )
    assert "layer.bias: (4,) captured, (3,) in the module" in replay(bundle)[2]


def test_the_command_finds_the_users_module_in_its_directory(tmp_path: Path) -> None:
    bundle = captured(tmp_path, Small, replay_models.mean_step, NAN)
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "class Small(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Linear(4, 3)\n"
        "def step(model, batch):\n"
        "    return model.layer(batch['x']).square().mean()\n"
    )
    command = ["-m", "ddpstats", "replay", bundle.name, "--model", "mine:Small", "--step", "mine:step"]
    done = programs.run([*command, "--json", "--bisect"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["bit_for_bit"] == {"losses": "equal", "norms": "equal", "gradients": "equal"}
    assert result["bisect"]["origin"]["what"] == "batch['x']"


def test_help_does_not_import_torch() -> None:
    code = (
        "import contextlib, sys, ddpstats.cli\n"
        "with contextlib.suppress(SystemExit): ddpstats.cli.main(['replay', '--help'])\n"
        "print({'torch', 'numpy'} & set(sys.modules))"
    )
    done = programs.run(["-c", code], fresh=True)
    assert done.stdout.endswith("set()\n"), done.stdout + done.stderr

"""Results in the files that the real loggers write."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import ddpstats
from ddpstats import ConfigError, reduce_stats
from ddpstats.integrations import loggers
from ddpstats.testing import PerRank, RankPool, count_collectives
from tests import scripts
from tests.needs import needs

ROOT = Path(__file__).parents[2]
STATS = {"loss": 0.5, "per_layer": [1.0, 2.5], "part": {"ctc": math.nan, "tokens": ddpstats.Sum(7)}, "absent": None}
FLAT = {"loss": 0.5, "per_layer[0]": 1.0, "per_layer[1]": 2.5, "part/ctc": math.nan, "part/tokens": 7.0}


@contextlib.contextmanager
def foreign_warnings() -> Iterator[None]:
    """The libraries' own deprecations are not ours to mend."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def same(found: dict[str, float], expected: dict[str, float]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name] == value or (math.isnan(value) and math.isnan(found[name])) for name, value in expected.items()
    )


def test_tensorboard(tmp_path: Path) -> None:
    needs("tensorboard")
    with foreign_warnings():
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(tmp_path)) as writer:
            for step in (3, 4):
                loggers.write(writer, reduce_stats(STATS), step, prefix="train/")
                loggers.write(None, reduce_stats(STATS), step)
        events = EventAccumulator(str(tmp_path)).Reload()
    names = events.Tags()["scalars"]
    rows = {name: [(event.step, event.value) for event in events.Scalars(name)] for name in names}
    assert [step for step, _ in rows["train/loss"]] == [3, 4]
    assert same({name.removeprefix("train/"): row[-1][1] for name, row in rows.items()}, FLAT)


def test_wandb(tmp_path: Path) -> None:
    needs("wandb")
    script = tmp_path / "run.py"
    script.write_text(
        textwrap.dedent("""
            import sys, wandb, ddpstats
            from ddpstats.integrations import loggers

            run = wandb.init(mode="offline", dir=sys.argv[1], project="p")
            reduced = ddpstats.reduce_stats({"loss": 0.5, "per_layer": [1.0, 2.5]})
            loggers.write(run, reduced, 3)
            loggers.write(wandb, reduced, 4, prefix="x/")
            print("step 3", {name: float(run.summary[name]) for name in ("loss", "per_layer[0]", "per_layer[1]")})
            run.finish()
        """)
    )
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
        env={**os.environ, "WANDB_SILENT": "true", "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(ROOT)},
    )
    names = {"loss": 0.5, "per_layer[0]": 1.0, "per_layer[1]": 2.5}
    assert f"step 3 {names}" in done.stdout, done.stdout + done.stderr
    (written,) = tmp_path.rglob("*.wandb")
    assert all((prefix + name).encode() in written.read_bytes() for name in names for prefix in ("", "x/"))


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    with foreign_warnings():
        import mlflow

        mlflow.set_tracking_uri(tmp_path.as_uri())
        mlflow.set_experiment("test")
        with mlflow.start_run() as run:
            loggers.write(mlflow, reduce_stats(STATS), 3)
        found = mlflow.get_run(run.info.run_id).data.metrics
    assert same(found, {name.replace("[", ".").replace("]", ""): value for name, value in FLAT.items()})
    with pytest.raises(ConfigError, match=r"under one name 'a\.0'"):
        loggers.write(mlflow, reduce_stats({"a": [1.0], "a.0": 2.0}), 3)


def test_hugging_face_trainer_on_two_ranks(tmp_path: Path) -> None:
    needs("transformers", "tensorboard")
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
            import pathlib, sys, torch, transformers, ddpstats
            from ddpstats.integrations import loggers

            class Model(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self.layer = torch.nn.Linear(1, 1)

                def forward(self, x):
                    return {"loss": self.layer(x).square().mean()}

            class Trainer(transformers.Trainer):
                def training_step(self, *args, **kwargs):
                    loss = super().training_step(*args, **kwargs)
                    rank = self.args.process_index
                    reduced = ddpstats.reduce_stats({"l1" if rank == 0 else "snr": 1.0 - 2 * rank})
                    loggers.write(self, reduced, self.state.global_step)
                    return loss

            arguments = transformers.TrainingArguments(
                sys.argv[1], max_steps=2, per_device_train_batch_size=1, use_cpu=True, report_to="tensorboard",
                disable_tqdm=True, save_strategy="no", ddp_backend="gloo", logging_strategy="no",
            )
            trainer = Trainer(Model(), arguments, train_dataset=[{"x": torch.ones(1)}] * 8)
            trainer.train()
            history = [(entry["l1"], entry["snr"]) for entry in trainer.state.log_history if "l1" in entry]
            pathlib.Path(sys.argv[1], f"history{trainer.args.process_index}").write_text(str(history))
            torch.distributed.destroy_process_group()
        """)
    )
    command = ["-m", "ddpstats", "run", "--nproc", "2", "--guard", "off", str(script), str(tmp_path / "out")]
    done = scripts.run(command, timeout=150, TENSORBOARD_LOGGING_DIR=str(tmp_path / "events"))
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    for rank in (0, 1):
        assert (tmp_path / "out" / f"history{rank}").read_text() == "[(1.0, -1.0), (1.0, -1.0)]"
    with foreign_warnings():
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        files = [path.parent for path in tmp_path.rglob("events.out.tfevents*")]
        events = EventAccumulator(str(files[0])).Reload()
    assert [event.value for event in events.Scalars("train/snr")] == [-1.0, -1.0]


def write_on_one_rank() -> tuple[int, int]:
    """Collectives while rank 0 alone writes; and how many scalars it wrote."""
    written: list[Any] = []

    class Writer:
        def add_scalar(self, *args: Any) -> None:
            written.append(args)

    reduced = reduce_stats(STATS)
    with count_collectives() as seen:
        loggers.write(Writer() if dist.get_rank() == 0 else None, reduced, 3)
    return seen.total, len(written)


def test_writing_sends_nothing(two_ranks: RankPool) -> None:
    assert two_ranks.run(write_on_one_rank).values() == [(0, len(FLAT)), (0, 0)]


class Written(dict[str, float]):
    """A writer as TensorBoard's, into a dict."""

    def add_scalar(self, name: str, value: float, step: int) -> None:
        assert name not in self
        self[name] = value


def write_per_rank(stats: Any) -> dict[str, float]:
    written = Written()
    loggers.write(written, reduce_stats(stats, name="per rank", per_rank=True), 3, prefix="train/", per_rank=True)
    return written


def test_min_and_max_with_their_ranks_where_asked_for(two_ranks: RankPool) -> None:
    stats = [{"loss": 1.0, "l": [math.nan, math.nan]}, {"loss": -2.0, "l": [3.0, math.nan], "on": ddpstats.Any(True)}]
    expected = {
        "loss": -0.5,
        "loss/min": -2.0,
        "loss/min_rank": 1.0,
        "loss/max": 1.0,
        "loss/max_rank": 0.0,
        "l[0]": math.nan,
        "l[0]/min": 3.0,
        "l[0]/min_rank": 1.0,
        "l[0]/max": 3.0,
        "l[0]/max_rank": 1.0,
        "l[1]": math.nan,
        "on": 1.0,
        "on/min": 1.0,
        "on/min_rank": 1.0,
        "on/max": 1.0,
        "on/max_rank": 1.0,
    }
    for found in two_ranks.run(write_per_rank, PerRank(stats)).values():
        assert same(found, {f"train/{name}": value for name, value in expected.items()})


def test_min_and_max_that_cannot_be_written_are_refused_on_ranks_that_do_not_log() -> None:
    with pytest.raises(ConfigError, match="reduce with per_rank=True"):
        loggers.write(None, reduce_stats(STATS), 1, per_rank=True)
    with pytest.raises(ConfigError, match="would write 'loss/min' twice"):
        loggers.write(None, reduce_stats({"loss": 1.0, "loss/min": 2.0}, per_rank=True), 1, per_rank=True)


def test_no_logger_is_imported() -> None:
    code = """
import sys, ddpstats
from ddpstats.integrations import loggers
class Writer:
    def add_scalar(self, *args): pass
loggers.write(Writer(), ddpstats.reduce_stats({"a": 1.0}), 1)
print({"tensorboard", "tensorboardX", "wandb", "mlflow", "transformers"} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "set()\n", done.stderr


def test_what_is_no_writer_is_named() -> None:
    with pytest.raises(ConfigError, match=r"type builtins\.dict is not known.*reduced\.flat\(\)"):
        loggers.write({}, reduce_stats(STATS), 1)
    not_reduced: Any = {"loss": 1.0}
    with pytest.raises(TypeError, match="a Reduced is needed, not dict"):
        loggers.write(None, not_reduced, 1)

"""The documented lines give loggers every path of a reduction; `write_window` flushes a window in a trainer's rows."""

from __future__ import annotations

import contextlib
import csv
import importlib
import json
import math
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ddpstats
from ddpstats import ConfigError, reduce_stats
from ddpstats.integrations import loggers
from ddpstats.testing import RankPool
from tests import programs
from tests.integrations.on_ranks import documented, write
from tests.integrations.window_adds import KEYS, close, expected
from tests.needs import ROOT, needs

STATS = {"loss": 0.5, "per_layer": [1.0, 2.5], "part": {"ctc": math.nan, "tokens": ddpstats.Sum(7)}, "absent": None}
FLAT = {"loss": 0.5, "per_layer[0]": 1.0, "per_layer[1]": 2.5, "part/ctc": math.nan, "part/tokens": 7.0}


@contextlib.contextmanager
def foreign_warnings() -> Iterator[None]:
    """The libraries' own deprecations are not ours to mend."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def same(logged: dict[str, float], expected: dict[str, float]) -> bool:
    return logged.keys() == expected.keys() and all(
        logged[name] == value or (math.isnan(value) and math.isnan(logged[name])) for name, value in expected.items()
    )


@pytest.mark.library
def test_tensorboard_has_every_path(tmp_path: Path) -> None:
    needs("tensorboard")
    with foreign_warnings():
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(tmp_path)) as writer:
            for step in (3, 4):
                write("TensorBoard", writer=writer, reduced=reduce_stats(STATS), step=step)
        events = EventAccumulator(str(tmp_path)).Reload()
    names = events.Tags()["scalars"]
    rows = {name: [(event.step, event.value) for event in events.Scalars(name)] for name in names}
    assert [step for step, _ in rows["loss"]] == [3, 4]
    assert same({name: row[-1][1] for name, row in rows.items()}, FLAT)


@pytest.mark.library
def test_wandb_has_every_path(tmp_path: Path) -> None:
    needs("wandb")
    script = tmp_path / "run.py"
    script.write_text(
        textwrap.dedent(f"""
            import sys, warnings
            warnings.simplefilter("ignore")
            import wandb, ddpstats

            run = wandb.init(mode="offline", dir=sys.argv[1], project="p")
            reduced = ddpstats.reduce_stats({{"loss": 0.5, "per_layer": [1.0, 2.5]}})
            for step in (3, 4):  # the summary has a step when the next one comes
                {documented("Weights & Biases")}
            print("step 3", {{name: float(run.summary[name]) for name in ("loss", "per_layer[0]", "per_layer[1]")}})
            run.finish()
        """)
    )
    done = programs.run([str(script), str(tmp_path)], cwd=ROOT, environ={"WANDB_SILENT": "true"})
    names = {"loss": 0.5, "per_layer[0]": 1.0, "per_layer[1]": 2.5}
    assert f"step 3 {names}" in done.stdout, done.stdout + done.stderr
    (written,) = tmp_path.rglob("*.wandb")
    assert all(name.encode() in written.read_bytes() for name in names)


@pytest.mark.library
def test_mlflow_has_every_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The active run's by the module, and that of a run in hand; neither is a trainer for a window."""
    needs("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    with foreign_warnings():
        import mlflow

        mlflow.set_tracking_uri(tmp_path.as_uri())
        mlflow.set_experiment("test")
        names = {"mlflow": mlflow, "reduced": reduce_stats(STATS), "step": 3}
        with mlflow.start_run() as active:
            write("MLflow", **names)
        with mlflow.start_run() as run:
            pass
        write("MLflow, a run of your own", run=run, **names)
        logged = [mlflow.get_run(each.info.run_id).data.metrics for each in (active, run)]
    spelled = {name.replace("[", ".").replace("]", ""): value for name, value in FLAT.items()}
    assert all(same(metrics, spelled) for metrics in logged)
    with ddpstats.StatsWindow() as window:
        for no_trainer in (run, mlflow):
            with pytest.raises(ConfigError, match="is not known; legal: a Trainer of"):
                loggers.write_window(no_trainer, window)


@pytest.mark.library
def test_lightnings_loggers_have_every_path(tmp_path: Path) -> None:
    needs("lightning")
    with foreign_warnings():
        import lightning
        from lightning.pytorch.loggers import CSVLogger

        logger = CSVLogger(str(tmp_path))
        trainer = lightning.Trainer(accelerator="cpu", logger=logger, enable_checkpointing=False)
        write("Lightning's loggers", trainer=trainer, reduced=reduce_stats(STATS), step=3)
        logger.save()
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert same({name: float(value) for name, value in row.items()}, {**FLAT, "step": 3.0})


def test_a_line_of_json_has_every_path(capsys: pytest.CaptureFixture[str]) -> None:
    write("none: a line of JSON", reduced=reduce_stats(STATS), step=3)
    assert same(json.loads(capsys.readouterr().out), {"step": 3, **FLAT})


LIMIT_SEC = 240  # of ranks that import a trainer, on a loaded machine


def trained(pool: RankPool, run: Callable[[str], Any], folder: Path) -> list[Any]:
    return pool.run(run, str(folder), timeout_sec=LIMIT_SEC).values()


def transformers_runs() -> Any:
    needs("transformers", "tensorboard")
    return importlib.import_module("tests.integrations.transformers_runs")


def written_to_tensorboard(folder: Path, name: str) -> list[tuple[int, float]]:
    with foreign_warnings():
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        files = [path.parent for path in folder.rglob("events.out.tfevents*")]
        events = EventAccumulator(str(files[0])).Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


@pytest.mark.library
def test_hugging_face_trainer_on_two_ranks(tmp_path: Path, two_ranks: RankPool) -> None:
    runs = transformers_runs()
    for history in trained(two_ranks, runs.reduced_in_each_step, tmp_path):
        assert [(row["l1"], row["snr"]) for row in history if "l1" in row] == [(1.0, -1.0), (1.0, -1.0)]
    assert [value for _, value in written_to_tensorboard(tmp_path, "train/snr")] == [-1.0, -1.0]


@pytest.mark.library
def test_a_window_is_flushed_in_the_rows_of_hugging_faces_trainer(tmp_path: Path, two_ranks: RankPool) -> None:
    """Ranks add other keys, or nothing; the trainer logs each tenth step, and evaluates in between."""
    runs = transformers_runs()
    for history, returned, collectives, left in trained(two_ranks, runs.windowed, tmp_path):
        rows = [row for row in history if "acc" in row]
        assert [(row["step"], "loss" in row) for row in rows] == [(10, True), (20, True), (30, True), (34, False)]
        for row, first in zip(rows, (0, 20, 40, 60), strict=True):
            wanted = expected(first, min(first + 20, 68))
            assert close({name: row[name] for name in row.keys() & KEYS}, wanted)
        evaluated = [row["step"] for row in history if "eval_loss" in row]
        assert evaluated[:2] == [15, 30]  # and, in newer versions, after the last step
        assert not KEYS & returned.keys()
        assert (collectives, left) == (4, 0)  # three rows, and the end
    written = written_to_tensorboard(tmp_path, "train/acc")
    assert [step for step, _ in written] == [10, 20, 30, 34]
    assert written[1][1] == pytest.approx(expected(20, 40)["acc"])


@pytest.mark.library
def test_a_name_that_the_trainer_logs_itself_is_refused_on_every_rank(tmp_path: Path, two_ranks: RankPool) -> None:
    for row, error in trained(two_ranks, transformers_runs().a_name_of_the_trainer, tmp_path):
        assert (row["window/loss"], row["window/loss/max"], row["window/loss/max_rank"]) == (0.5, 1.0, 1.0)
        assert error.startswith("the Trainer logs 'loss' itself")


def test_write_window_of_an_unknown_trainer_is_an_error_that_names_it() -> None:
    fake = type("Trainer", (), {"__module__": "transformers.trainer"})()
    with ddpstats.StatsWindow() as window:
        with pytest.raises(ConfigError, match=r"a trainer of type builtins\.dict is not known; .* window\.flush"):
            loggers.write_window({}, window)
        needs("transformers")
        with pytest.raises(ConfigError, match=r"transformers\.trainer\.Trainer lacks .* 'log'"):
            loggers.write_window(fake, window)
    not_a_window: Any = {}
    with pytest.raises(TypeError, match="a StatsWindow is needed, not dict"):
        loggers.write_window(None, not_a_window)


def test_no_logger_and_no_trainer_is_imported() -> None:
    code = """
import sys, ddpstats.integrations.loggers
print({"tensorboard", "tensorboardX", "wandb", "mlflow", "transformers", "lightning"} & set(sys.modules))
"""
    done = programs.run(["-c", code], fresh=True)
    assert done.stdout == "set()\n", done.stderr

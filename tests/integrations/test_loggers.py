"""`loggers.write` and `write_window` put every path of a reduction where the logger or trainer keeps its numbers."""

from __future__ import annotations

import contextlib
import importlib
import math
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import ddpstats
from ddpstats import ConfigError, reduce_stats
from ddpstats.integrations import loggers
from ddpstats.testing import PerRank, RankPool, count_collectives
from tests import programs
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


def same(found: dict[str, float], expected: dict[str, float]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name] == value or (math.isnan(value) and math.isnan(found[name])) for name, value in expected.items()
    )


@pytest.mark.library
def test_tensorboard_has_every_path(tmp_path: Path) -> None:
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


@pytest.mark.library
def test_wandb_has_every_path(tmp_path: Path) -> None:
    needs("wandb")
    script = tmp_path / "run.py"
    script.write_text(
        textwrap.dedent("""
            import sys, warnings
            warnings.simplefilter("ignore")
            import wandb, ddpstats
            from ddpstats.integrations import loggers

            run = wandb.init(mode="offline", dir=sys.argv[1], project="p")
            reduced = ddpstats.reduce_stats({"loss": 0.5, "per_layer": [1.0, 2.5]})
            loggers.write(run, reduced, 3)
            loggers.write(wandb, reduced, 4, prefix="x/")
            print("step 3", {name: float(run.summary[name]) for name in ("loss", "per_layer[0]", "per_layer[1]")})
            run.finish()
        """)
    )
    done = programs.run([str(script), str(tmp_path)], cwd=ROOT, environ={"WANDB_SILENT": "true"})
    names = {"loss": 0.5, "per_layer[0]": 1.0, "per_layer[1]": 2.5}
    assert f"step 3 {names}" in done.stdout, done.stdout + done.stderr
    (written,) = tmp_path.rglob("*.wandb")
    assert all((prefix + name).encode() in written.read_bytes() for name in names for prefix in ("", "x/"))


@pytest.mark.library
def test_mlflow_has_every_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert (collectives, left) == (3, 0)
    written = written_to_tensorboard(tmp_path, "train/acc")
    assert [step for step, _ in written] == [10, 20, 30, 34]
    assert written[1][1] == pytest.approx(expected(20, 40)["acc"])


@pytest.mark.library
def test_a_name_that_the_trainer_logs_itself_is_refused_on_every_rank(tmp_path: Path, two_ranks: RankPool) -> None:
    for row, error in trained(two_ranks, transformers_runs().a_name_of_the_trainer, tmp_path):
        assert (row["window/loss"], row["window/loss/max"], row["window/loss/max_rank"]) == (0.5, 1.0, 1.0)
        assert error.startswith("the Trainer logs 'loss' itself")


def test_write_window_of_an_unknown_trainer_is_an_error_that_names_it() -> None:
    with ddpstats.StatsWindow() as window:
        for trainer, said in (
            (Written(), r"a trainer of type .*Written is not known; legal: .* write\(writer, window\.flush"),
            (type("Trainer", (), {"__module__": "lightning.pytorch", "callbacks": []})(), r"has no callback_metrics, "),
        ):
            with pytest.raises(ConfigError, match=said):
                loggers.write_window(trainer, window)
    not_a_window: Any = {}
    with pytest.raises(TypeError, match="a StatsWindow is needed, not dict"):
        loggers.write_window(None, not_a_window)


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


def extremes(name: str, mean: float, least: float, least_rank: int, largest: float, largest_rank: int) -> Any:
    return {
        name: mean,
        f"{name}/min": least,
        f"{name}/min_rank": least_rank,
        f"{name}/max": largest,
        f"{name}/max_rank": largest_rank,
    }


def test_per_rank_writes_min_and_max_with_their_ranks(two_ranks: RankPool) -> None:
    stats = [{"loss": 1.0, "l": [math.nan, math.nan]}, {"loss": -2.0, "l": [3.0, math.nan], "on": ddpstats.Any(True)}]
    expected = {
        **extremes("loss", -0.5, -2.0, 1, 1.0, 0),
        **extremes("l[0]", math.nan, 3.0, 1, 3.0, 1),
        "l[1]": math.nan,
        **extremes("on", 1.0, 1.0, 1, 1.0, 1),
    }
    for written in two_ranks.run(write_per_rank, PerRank(stats)).values():
        assert same(written, {f"train/{name}": value for name, value in expected.items()})


def test_per_rank_that_cannot_be_written_is_an_error_also_without_a_writer() -> None:
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
    done = programs.run(["-c", code])
    assert done.stdout == "set()\n", done.stderr


def test_write_to_an_unknown_writer_is_an_error_that_names_it() -> None:
    with pytest.raises(ConfigError, match=r"type builtins\.dict is not known.*reduced\.flat\(\)"):
        loggers.write({}, reduce_stats(STATS), 1)
    not_reduced: Any = {"loss": 1.0}
    with pytest.raises(TypeError, match="a Reduced is needed, not dict"):
        loggers.write(None, not_reduced, 1)

"""Ranks that hold other losses are stopped on every rank, with both keys and both lines, however the program loops."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ddpstats.testing import RankPool
from tests import programs
from tests.guard import label_runs as runs
from tests.needs import needs


@pytest.mark.parametrize("mode", ["strict", "step"])
@pytest.mark.parametrize("name", list(runs.PROGRAMS))
def test_other_losses_are_an_error_on_every_rank(two_ranks: RankPool, name: str, mode: str) -> None:
    first, second = two_ranks.run(runs.ending_of, name, mode, False).values()
    assert first == second
    assert first.startswith("CollectiveMismatch")
    by_rank = re.findall(r"rank (\d): .*'(\w+)(?:\[0\])?'\n +at \S+label_\w+\.py:\d+ in \w+\n", first)
    assert [rank for rank, _ in by_rank] == ["0", "1"]
    assert {key for _, key in by_rank} <= {"loss", "l1_loss", "snr_loss"}
    assert by_rank[0][1] != by_rank[1][1]


@pytest.mark.parametrize("mode", ["strict", "step"])
@pytest.mark.parametrize("name", list(runs.PROGRAMS))
def test_the_same_losses_are_silent(two_ranks: RankPool, name: str, mode: str) -> None:
    assert two_ranks.run(runs.ending_of, name, mode, True).values() == ["silent"] * 2


def test_only_files_with_functions_on_the_stack_are_read(two_ranks: RankPool) -> None:
    """Wherever torch and other packages are installed: not all modules that the process has imported."""
    for files in two_ranks.run(runs.files_read).values():
        assert "label_helpers.py" in files
        assert set(files) <= {"label_runs.py", "label_helpers.py"}


LIGHTNING = """
    import logging, warnings
    import torch
    import lightning
    import ddpstats

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch, index):
            for name in ("a", "b") if self.global_rank == 0 else ("b", "a"):
                value = torch.tensor(1.0 if name == "a" else 100.0)
                self.log(name, value, sync_dist=True, on_step=ON_STEP, on_epoch=not ON_STEP)
            return self.layer(batch).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet = dict(enable_progress_bar=False, logger=False, enable_checkpointing=False, enable_model_summary=False)
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", **quiet)
    with ddpstats.collective_guard(MODE):
        trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(4, 1)))
"""


@pytest.mark.library
@pytest.mark.parametrize("mode", ["strict", "step"])
@pytest.mark.parametrize("on_step", [True, False], ids=["on step", "on epoch"])
def test_metrics_that_lightning_syncs_in_another_order_are_named(script: Any, on_step: bool, mode: str) -> None:
    needs("lightning")
    path = script(f"ON_STEP, MODE = {on_step}, {mode!r}", LIGHTNING)
    done = programs.on_ranks(path)
    assert re.search(r"rank 0: .*'(training_step\.)?a'", done.stderr), done.stderr
    assert re.search(r"rank 1: .*'(training_step\.)?b'", done.stderr)

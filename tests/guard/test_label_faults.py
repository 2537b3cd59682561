"""Ranks that hold other losses are stopped on every rank, with both keys and both lines, however the program loops."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddpstats.guard.labels import read, source
from ddpstats.testing import RankPool
from tests import programs
from tests.guard import label_helpers
from tests.guard.runs import guarded
from tests.needs import needs

# -- what runs on the ranks -------------------------------------------------------------------------------------------


Stats = dict[str, Any]


def recursive_sum(obj: Any, weight: torch.Tensor) -> Any:
    """Reduce as espnet does: leaf by leaf, gathered and added up."""
    if isinstance(obj, dict):
        return {key: recursive_sum(value, weight) for key, value in obj.items()}
    obj = (obj * weight.to(obj.dtype)).sum()
    gathered = [torch.empty_like(obj) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, obj)
    obj = sum(gathered)
    return obj


def by_recursive_sum(stats: Stats) -> None:
    recursive_sum(stats, torch.ones(1))


def by_loop_over_items(stats: Stats) -> None:
    averages = {}
    for key, value in stats.items():
        mean = value.detach().clone()
        dist.all_reduce(mean)
        averages[key] = mean / dist.get_world_size()


def by_another_module(stats: Stats) -> None:
    for key, value in stats.items():
        stats[key] = label_helpers.average(value)


PROGRAMS = (by_recursive_sum, by_loop_over_items, by_another_module)


def ending_of(program: Callable[[Stats], None], mode: Any) -> str:
    return guarded(mode, program, {"loss": torch.ones(1), "l1_loss" if dist.get_rank() else "snr_loss": torch.ones(1)})


def files_read() -> list[str]:
    """Return the names of the files that labels that differ are explained by."""
    source._files.clear()
    read._call_routes.clear()
    assert ending_of(by_another_module, "strict").startswith("CollectiveMismatch")
    return sorted(Path(name).name for name in source._files)


# -- tests ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["strict", "step"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_other_losses_are_an_error_on_every_rank(
    two_ranks: RankPool, program: Callable[[Stats], None], mode: str
) -> None:
    first, second = two_ranks.run(ending_of, program, mode).values()
    assert first == second
    assert first.startswith("CollectiveMismatch")
    by_rank = re.findall(r"rank (\d): .*'(\w+)(?:\[0\])?'\n +at \S+label_\w+\.py:\d+ in \w+\n", first)
    assert [rank for rank, _ in by_rank] == ["0", "1"]
    assert {key for _, key in by_rank} <= {"loss", "l1_loss", "snr_loss"}
    assert by_rank[0][1] != by_rank[1][1]


def test_only_files_with_functions_on_the_stack_are_read(two_ranks: RankPool) -> None:
    """Wherever torch and other packages are installed: not all modules that the process has imported."""
    for files in two_ranks.run(files_read).values():
        assert "label_helpers.py" in files
        assert set(files) <= {"test_label_faults.py", "label_helpers.py", "runs.py"}


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
@pytest.mark.parametrize(("on_step", "mode"), [(True, "strict"), (False, "step")], ids=["on step", "on epoch"])
def test_metrics_that_lightning_syncs_in_another_order_are_named(script: Any, on_step: bool, mode: str) -> None:
    needs("lightning")
    path = script(f"ON_STEP, MODE = {on_step}, {mode!r}", LIGHTNING)
    done = programs.on_ranks(path)
    assert re.search(r"rank 0: .*'(training_step\.)?a'", done.stderr), done.stderr
    assert re.search(r"rank 1: .*'(training_step\.)?b'", done.stderr)

"""The functions that run on the ranks of `test_espnet`: espnet's trainers on tiny models whose stats follow a script.

espnet is imported inside functions only: some tests need to install before that, and the parent process never needs it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib
import sys
import tempfile
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from ddpstats.integrations import espnet
from tests.integrations.on_ranks import installed
from tests.training import rank

Step = tuple[dict[str, Any], int]
"""What the model says of one batch: its stats, and its batch size, which is the weight."""


@dataclasses.dataclass(frozen=True)
class Script:
    """One rank's stats: per epoch, and per step in it. A single epoch is repeated."""

    train: Sequence[Sequence[Step]]
    valid: Sequence[Sequence[Step]]
    epochs: int = 1
    plateau: bool = False
    patience: int | None = None


@dataclasses.dataclass(frozen=True)
class Trained:
    """One rank after `Trainer.run`: what its Reporter says of the model's own stats, per epoch, and what came of it."""

    train: list[dict[str, float]]
    valid: list[dict[str, float]]
    parameters: list[float]
    learning_rate: float


# Kept from the Reporter: what the model reports, without times, learning rates and gradient norms.
def _own(stats: dict[str, Any]) -> dict[str, float]:
    timing = ("time", "lr", "total_count", "grad_norm", "clip", "loss_scale")
    return {key: float(value) for key, value in stats.items() if not any(word in key for word in timing)}


# -- the plain trainer ------------------------------------------------------------------------------------------------


def train(script: Script, install: bool) -> Trained:
    """Run espnet's real `Trainer.run` on this rank's script."""
    with installed(espnet, install):
        return _train(script)


def install_then_import(script: Script) -> tuple[Trained, bool, bool]:
    """Install before any trainer is imported; return whether trainers then had ours, and have espnet's own again."""
    assert not [name for name in sys.modules if name.startswith("espnet2.train")]
    with installed(espnet):
        trained = _train(script)
        import espnet2.torch_utils.recursive_op as source
        import espnet2.train.trainer as trainer

        ours = trainer.recursive_average is source.recursive_average is espnet._recursive_average
    stock = trainer.recursive_average is source.recursive_average
    return trained, ours, stock and source.recursive_average.__module__ == source.__name__


NEWER_CONSUMERS = ("espnet2.gan_codec.shared.loss.loss_balancer", "espnet2.train.deepspeed_trainer")
"""What binds `recursive_average`, but not in espnet 202402."""


def is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # nor a package above it
        return False


def consumers(install: bool) -> dict[str, tuple[str, str]]:
    """Per espnet module that binds `recursive_average`: the module it is from while patched, and after `uninstall`."""
    import espnet2.train.gan_trainer
    import espnet2.train.trainer
    import espnet2.train.uasr_trainer  # noqa: F401

    for name in filter(is_there, NEWER_CONSUMERS):
        importlib.import_module(name)

    def bound() -> dict[str, str]:
        modules = {name: module for name, module in sys.modules.items() if name.startswith("espnet2.")}
        functions = {name: getattr(module, "recursive_average", None) for name, module in modules.items()}
        return {name: function.__module__ for name, function in functions.items() if function is not None}

    with installed(espnet, install):
        during = bound()
    after = bound()
    return {name: (during[name], after[name]) for name in during}


def _train(script: Script) -> Trained:
    import espnet2.train.trainer as trainer
    from espnet2.train.distributed_utils import DistributedOption

    model = scripted_model(script)
    optimizer, scheduler = torch.optim.SGD(model.parameters(), lr=0.1), None
    if script.plateau:
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
    reporters: list[Any] = []

    class Seen(trainer.Reporter):  # type: ignore[misc]  # espnet has no types
        def __init__(self) -> None:
            super().__init__()
            reporters.append(self)

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(trainer, "Reporter", Seen):
        trainer.Trainer.run(
            model=model,
            optimizers=[optimizer],
            schedulers=[scheduler],
            train_iter_factory=batches(script.train),
            valid_iter_factory=batches(script.valid),
            plot_attention_iter_factory=None,
            trainer_options=options_of(trainer.TrainerOptions, folder, script),
            distributed_option=DistributedOption(
                distributed=True,
                dist_backend="gloo",
                ngpu=0,
                dist_rank=dist.get_rank(),
                dist_world_size=dist.get_world_size(),
            ),
        )
    stats = reporters[0].stats
    return Trained(
        train=[_own(stats[epoch]["train"]) for epoch in sorted(stats)],
        valid=[_own(stats[epoch]["valid"]) for epoch in sorted(stats)],
        parameters=torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist(),
        learning_rate=optimizer.param_groups[0]["lr"],
    )


def options_of(options_class: Any, folder: str, script: Script, **more: Any) -> Any:
    """Return the options of a trainer; what is not named here, or not known to this version, is off."""
    off = {field.name: False if field.type is bool else None for field in dataclasses.fields(options_class)}
    settings = {
        "ngpu": 0,
        "train_dtype": "float32",
        "accum_grad": 1,
        "grad_clip": 5.0,
        "grad_clip_type": 2.0,
        "log_interval": 1,
        "wandb_model_log_interval": 0,
        "save_strategy": "all",
        "adapter": "",
        "output_dir": pathlib.Path(folder),
        "max_epoch": script.epochs,
        "seed": 0,
        "patience": script.patience,
        "keep_nbest_models": 1,
        "nbest_averaging_interval": 0,
        "early_stopping_criterion": ("valid", "a", "min"),
        "best_model_criterion": [("valid", "a", "min")],
        "val_scheduler_criterion": ("valid", "a"),
        "unused_parameters": True,
        **more,
    }
    return options_class(**off | {name: value for name, value in settings.items() if name in off})


def batches(script: Sequence[Sequence[Step]]) -> Any:
    """Return a factory of batches that carry their epoch and step, by which the model finds its stats."""
    from espnet2.iterators.abs_iter_factory import AbsIterFactory

    class Factory(AbsIterFactory):  # type: ignore[misc]  # espnet has no types
        def build_iter(
            self, epoch: int, shuffle: bool | None = None
        ) -> list[tuple[list[str], dict[str, torch.Tensor]]]:
            steps = len(_epoch_of(script, epoch - 1))
            return [(["utt"], {"at": torch.tensor([epoch - 1, step])}) for step in range(steps)]

    return Factory()


def _epoch_of(script: Sequence[Sequence[Step]], epoch: int) -> Sequence[Step]:
    return script[epoch] if len(script) > 1 else script[0]


def _gathered(loss: torch.Tensor, stats: dict[str, Any], size: int) -> Any:
    """Change results as every espnet model does: numbers become tensors of one element, integers stay integers."""
    from espnet2.torch_utils.device_funcs import force_gatherable

    return force_gatherable((loss, stats, size), loss.device)


def scripted_model(script: Script) -> Any:
    from espnet2.train.abs_espnet_model import AbsESPnetModel

    class Model(AbsESPnetModel):  # type: ignore[misc]  # espnet has no types
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = torch.nn.Linear(3, 1)

        def forward(self, at: torch.Tensor, utt_id: list[str]) -> Any:
            epoch, step = at.tolist()
            stats, size = _epoch_of(script.train if self.training else script.valid, epoch)[step]
            x = torch.arange(3.0 * size).reshape(size, 3) / 10 + rank()
            return _gathered((self.linear(x) ** 2).mean(), stats, size)

        def collect_feats(self, **batch: torch.Tensor) -> dict[str, torch.Tensor]:
            return {}

    return Model()


# -- the other trainers -----------------------------------------------------------------------------------------------


def counts_of_uasr(stats: dict[str, Any], size: int) -> tuple[dict[str, float], dict[str, Any]]:
    """Average the counts of a validation step as `UASRTrainer` does; return them, and what a Reporter registers."""
    from espnet2.torch_utils import recursive_op
    from espnet2.train.reporter import SubReporter

    with installed(espnet):
        averaged, weight = recursive_op.recursive_average(stats, torch.tensor([float(size)]), True)
        reporter = SubReporter("valid", 1, 0)
        reporter.register(averaged, weight)
        reporter.next()
        registered = {name: values[0].weight for name, values in reporter.stats.items()}
    return {name: float(value) for name, value in averaged.items()}, registered

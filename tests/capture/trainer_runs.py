"""Each library's own trainer on a tiny model, with one bad batch: what `test_trainers` runs on the ranks.

The libraries are imported inside functions: a rank needs only its own trainer's.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ddpstats
from ddpstats.errors import DdpstatsError

RAISES = 777.0
"""A target that the model does not take."""


@dataclass(frozen=True)
class Scenario:
    """One training run.

    Attributes:
        trainer: lightning, transformers, espnet or accelerate.
        dirpath: where captures go; None trains without.
        policy: ``on_nonfinite=`` of the capture.
        bad, raises: (rank, index) of the batch that holds an infinity, and of the one that the model raises on.
        steps: how many optimizer steps there are.
        accumulate: how many batches each of them takes.
        option: a variant that one trainer has: see there.
    """

    trainer: str
    dirpath: str | None = None
    policy: str = "stop"
    bad: tuple[int, int] | None = None
    raises: tuple[int, int] | None = None
    steps: int = 3
    accumulate: int = 1
    option: str = ""

    def batches(self) -> list[dict[str, Tensor]]:
        """Return this rank's batches."""
        rank = dist.get_rank()
        made = [batch_of(rank, index) for index in range(self.steps * self.accumulate)]
        if self.bad is not None and self.bad[0] == rank:
            made[self.bad[1]]["x"][2, 1] = torch.inf
        if self.raises is not None and self.raises[0] == rank:
            made[self.raises[1]]["y"][0] = RAISES
        return made


@dataclass(frozen=True)
class Trained:
    """One rank's run: the parameters, the last verdict that was not ok, and what the trainer raised."""

    parameters: Tensor
    verdict: ddpstats.capture.CaptureVerdict | None
    error: str | None
    error_ranks: tuple[int, ...]
    counted: tuple[int, int]
    """Steps, by the trainer's count and by its scheduler's, where it has one."""


def batch_of(rank: int, index: int) -> dict[str, Tensor]:
    """Ranks differ in how many samples they have: what a trainer weights by them is then no 1."""
    generator = torch.Generator().manual_seed(100 * rank + index)
    x = torch.randn(6 + rank, 4, generator=generator)
    return {"x": x, "y": x.sum(1)}


class Net(nn.Module):
    """Dropout draws random numbers: without their state there is no replay."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        if bool((y == RAISES).any()):
            raise ValueError("no such target")
        out: Tensor = self.last(self.drop(torch.tanh(self.first(x)) + self.first(x))).squeeze(1)
        return (out - y).square().mean()

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": self.loss(x, y)}


def train(scenario: Scenario) -> Trained:
    """Every rank must call. A rank that raises on purpose ends as a script would: with its process."""
    torch.manual_seed(0)
    error: BaseException | None = None
    with _quietly(), tempfile.TemporaryDirectory() as folder:
        run = _TRAINERS[scenario.trainer](scenario, folder)
        try:
            run.train()
        except Exception as raised:
            error = raised
    if scenario.raises is not None and scenario.raises[0] == dist.get_rank():
        os._exit(1)
    notes = getattr(error, "__notes__", [])
    return Trained(
        parameters=torch.cat([parameter.detach().flatten() for parameter in run.model.parameters()]),
        verdict=run.verdict(),
        error=None if error is None else "\n".join([f"{type(error).__name__}: {error}", *notes]),
        error_ranks=error.ranks if isinstance(error, DdpstatsError) else (),
        counted=run.counted(),
    )


@dataclass
class _Run:
    model: nn.Module
    train: Callable[[], Any]
    verdict: Callable[[], ddpstats.capture.CaptureVerdict | None]
    counted: Callable[[], tuple[int, int]] = lambda: (0, 0)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Silence the libraries' advice: on a rank it would be noise."""
    for name in ("lightning.pytorch", "transformers", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _settings(scenario: Scenario) -> dict[str, Any]:
    assert scenario.dirpath is not None
    return {"dirpath": scenario.dirpath, "on_nonfinite": scenario.policy}


# -- Lightning --------------------------------------------------------------------------------------------------------


def lightning_net() -> Any:
    """Return a LightningModule; replay calls this factory."""
    lightning: Any = importlib.import_module("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc]  # a class found at run time
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()
            self.manual = False

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            loss = self.net.loss(**batch)
            if self.manual:
                for part, optimizer in enumerate(self.optimizers()):
                    optimizer.zero_grad()
                    self.manual_backward(loss if part == 0 else self.net.loss(**batch))
                    optimizer.step()
            return loss

        def configure_optimizers(self) -> Any:
            if self.manual:
                parts = (self.net.first, self.net.last)
                return [torch.optim.SGD(part.parameters(), lr=0.05) for part in parts]
            optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 100)]

    return Module()


def half_step(module: Any, batch: Any) -> Tensor:
    """Return the loss as Lightning has it with accumulate_grad_batches=2."""
    loss: Tensor = module.training_step(batch, 0) / 2
    return loss


def _lightning(scenario: Scenario, folder: str) -> _Run:
    """Options: "manual" optimization with two optimizers; "min_steps"."""
    lightning: Any = importlib.import_module("lightning")
    environments: Any = importlib.import_module("lightning.pytorch.plugins.environments")
    from ddpstats.integrations.lightning import DdpstatsNaNCapture

    module = lightning_net()
    if scenario.option == "manual":
        module.manual, module.automatic_optimization = True, False
    callbacks = [] if scenario.dirpath is None else [DdpstatsNaNCapture(**_settings(scenario))]
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy="ddp_find_unused_parameters_true" if scenario.option == "manual" else "ddp",
        plugins=[environments.LightningEnvironment()],
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
        max_epochs=1,
        min_steps=scenario.steps if scenario.option == "min_steps" else None,
        use_distributed_sampler=False,
        accumulate_grad_batches=scenario.accumulate,
        gradient_clip_val=None if scenario.option == "manual" else 5.0,
        callbacks=callbacks,
    )
    loader: Any = torch.utils.data.DataLoader(scenario.batches(), batch_size=None)  # type: ignore[arg-type]

    def counted() -> tuple[int, int]:
        return trainer.global_step, sum(config.scheduler.last_epoch for config in trainer.lr_scheduler_configs)

    verdict = lambda: callbacks[0].verdict if callbacks else None  # noqa: E731
    return _Run(module, lambda: trainer.fit(module, loader), verdict, counted)


# -- Hugging Face's Trainer -------------------------------------------------------------------------------------------


def _transformers(scenario: Scenario, folder: str) -> _Run:
    """Option: "bf16"."""
    transformers: Any = importlib.import_module("transformers")
    from ddpstats.integrations.transformers import NaNCaptureCallback

    _reset_accelerate()

    class Trainer(transformers.Trainer):  # type: ignore[misc]  # a class found at run time
        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(scenario.batches(), batch_size=None)  # type: ignore[arg-type]

    arguments = transformers.TrainingArguments(
        folder,
        max_steps=scenario.steps,
        gradient_accumulation_steps=scenario.accumulate,
        learning_rate=0.05,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=5.0,
        bf16=scenario.option == "bf16",
        use_cpu=True,
        ddp_backend="gloo",
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
        seed=0,
    )
    model = Net()
    stopper = None if scenario.dirpath is None else NaNCaptureCallback(**_settings(scenario))
    trainer = Trainer(model, arguments, callbacks=[] if stopper is None else [stopper])
    trainer.remove_callback(transformers.PrinterCallback)

    def run() -> None:
        torch.manual_seed(0)
        with contextlib.nullcontext() if stopper is None else stopper:
            trainer.train()

    return _Run(
        model,
        run,
        lambda: None if stopper is None else stopper.verdict,
        lambda: (trainer.state.global_step, getattr(trainer.lr_scheduler, "last_epoch", 0)),
    )


def _reset_accelerate() -> None:
    state: Any = importlib.import_module("accelerate.state")
    state.AcceleratorState._reset_state(True)
    state.GradientState._reset_state()


# -- espnet -----------------------------------------------------------------------------------------------------------


def espnet_net() -> Any:
    """Return an espnet model; replay calls this factory."""
    espnet_model: Any = importlib.import_module("espnet2.train.abs_espnet_model")
    functions: Any = importlib.import_module("espnet2.torch_utils.device_funcs")

    class Model(espnet_model.AbsESPnetModel):  # type: ignore[misc]  # a class found at run time
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, x: Tensor, y: Tensor, utt_id: list[str]) -> Any:
            loss = self.net.loss(x, y)
            return functions.force_gatherable((loss, {"loss": loss.detach()}, len(utt_id)), loss.device)

        def collect_feats(self, **batch: Tensor) -> dict[str, Tensor]:
            return {}

    return Model()


def _espnet(scenario: Scenario, folder: str) -> _Run:
    """Options: "installed" also uses the other part of the integration; "uneven": rank 1 has a batch less."""
    trainers: Any = importlib.import_module("espnet2.train.trainer")
    distributed: Any = importlib.import_module("espnet2.train.distributed_utils")
    iterators: Any = importlib.import_module("espnet2.iterators.abs_iter_factory")
    from ddpstats.integrations import espnet
    from tests.integrations import espnet_runs

    batches = [([f"utt{i}" for i in range(len(samples["y"]))], samples) for samples in scenario.batches()]
    if scenario.option == "uneven" and dist.get_rank() == 1:
        batches.pop()

    class Factory(iterators.AbsIterFactory):  # type: ignore[misc]  # a class found at run time
        def __init__(self, batches: Any) -> None:
            self.batches = batches

        def build_iter(self, epoch: int, shuffle: bool | None = None) -> Any:
            return [(names, dict(batch)) for names, batch in self.batches]

    model = espnet_net()
    held: list[Any] = []
    criterion = ("train", "loss", "min")
    options = espnet_runs.options_of(
        trainers.TrainerOptions,
        folder,
        espnet_runs.Script([], []),
        accum_grad=scenario.accumulate,
        unused_parameters=False,
        early_stopping_criterion=criterion,
        best_model_criterion=[criterion],
        val_scheduler_criterion=criterion[:2],
    )

    def run() -> None:
        if scenario.option == "installed":
            espnet.install()
        capture = None if scenario.dirpath is None else espnet.capture(**_settings(scenario))
        try:
            with contextlib.nullcontext() if capture is None else capture as capturing:
                held.append(capturing)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
                trainers.Trainer.run(
                    model=model,
                    optimizers=[optimizer],
                    schedulers=[None],
                    train_iter_factory=Factory(batches),
                    valid_iter_factory=Factory(batches[:1]),
                    plot_attention_iter_factory=None,
                    trainer_options=options,
                    distributed_option=distributed.DistributedOption(
                        distributed=True,
                        dist_backend="gloo",
                        ngpu=0,
                        dist_rank=dist.get_rank(),
                        dist_world_size=dist.get_world_size(),
                    ),
                )
        finally:
            espnet.uninstall()

    return _Run(model, run, lambda: held[0].verdict if held and held[0] is not None else None)


def _espnet_attributes() -> tuple[Any, ...]:
    trainers: Any = importlib.import_module("espnet2.train.trainer")
    return vars(trainers.Trainer)["train_one_epoch"], trainers.torch, torch.nn.utils.clip_grad_norm_


def espnet_left_alone(dirpath: str, is_off: bool) -> tuple[list[str], bool]:
    """Return the warnings of `capture`, and whether espnet's trainer is unchanged inside of it.

    ``is_off``: with DDPSTATS_DISABLE=1; otherwise espnet's trainer has another loop.
    """
    from ddpstats.integrations import espnet

    trainers: Any = importlib.import_module("espnet2.train.trainer")
    with warnings.catch_warnings(record=True) as caught, pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        if is_off:
            patch.setenv("DDPSTATS_DISABLE", "1")
        else:
            patch.setattr(trainers.Trainer, "train_one_epoch", classmethod(lambda cls, model, batches: None))
        before = _espnet_attributes()
        with espnet.capture(dirpath):
            is_unchanged = _espnet_attributes() == before
    return [str(warning.message) for warning in caught], is_unchanged


def espnet_afterwards(dirpath: str) -> tuple[list[bool], bool]:
    """Return which of espnet's attributes are replaced inside of `capture`, and whether none is after an error."""
    from ddpstats.integrations import espnet

    before = _espnet_attributes()
    with contextlib.suppress(KeyError), espnet.capture(dirpath):
        replaced = [old is not new for old, new in zip(before, _espnet_attributes(), strict=True)]
        raise KeyError
    return replaced, _espnet_attributes() == before


# -- accelerate -------------------------------------------------------------------------------------------------------


def accelerate_step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss as the loop below has it."""
    loss: Tensor = model(**batch)["loss"]
    return loss


def half_accelerate_step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss as accelerate has it with gradient_accumulation_steps=2."""
    return accelerate_step(model, batch) / 2


def _accelerate(scenario: Scenario, folder: str) -> _Run:
    accelerate: Any = importlib.import_module("accelerate")
    _reset_accelerate()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=scenario.accumulate)
    model = Net()
    ddp, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    verdicts: list[ddpstats.capture.CaptureVerdict] = []

    def run() -> None:
        with contextlib.ExitStack() as stack:
            capture = None
            if scenario.dirpath is not None:
                settings = {"optimizer": optimizer, "scaler": accelerator.scaler, **_settings(scenario)}
                capture = stack.enter_context(ddpstats.NaNCapture(model=ddp, **settings))
            for batch in scenario.batches():
                with accelerator.accumulate(ddp):
                    with contextlib.nullcontext() if capture is None else capture.micro_batch(batch) as micro:
                        loss = ddp(**batch)["loss"]
                        if micro is not None:
                            micro.loss = loss / accelerator.gradient_accumulation_steps
                        accelerator.backward(loss)
                    verdict = capture.check() if capture is not None and accelerator.sync_gradients else None
                    if verdict is not None and not verdict.ok:
                        verdicts.append(verdict)
                        if verdict.should_stop:
                            return
                        optimizer.zero_grad()
                        continue
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(ddp.parameters(), 5.0)
                    optimizer.step()
                    optimizer.zero_grad()

    return _Run(model, run, lambda: verdicts[-1] if verdicts else None)


_TRAINERS: dict[str, Callable[[Scenario, str], _Run]] = {
    "lightning": _lightning,
    "transformers": _transformers,
    "espnet": _espnet,
    "accelerate": _accelerate,
}

"""``ddpstats replay BUNDLE``: the captured step, run again in this one process.

1. Open the bundle, which executes nothing, and choose a rank: the lowest culprit that is present.
2. Import the user's factory and step function; the current directory is importable, as it is for ``python -m``.
3. Build the module under torch's "fake" process group, which `_Echo` completes: every other rank holds what this one
   holds.
4. Restore the state before the step, and run each micro-batch as it was kept (`_rerun.run`), as often as ``--repeat``
   says.
5. Compare losses, norms and gradients with the capture, bit for bit. A NaN equals a NaN, whatever its sign and payload
   are: torch promises nothing about those.
6. With ``--bisect``, run it once more and look at every operation (`bisect`).

torch is imported when something is run, so that ``--help`` is quick.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from ddpstats._base.text import count_of, first_line, print_report, shorten, stdout_to_stderr
from ddpstats._observe.frames import calls_step
from ddpstats.errors import BundleError, ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from ddpstats._observe.operators import Collective
    from ddpstats._rerun.run import RunSettings, StepFunction
    from ddpstats.capture.bisect import Search
    from ddpstats.capture.bundle import Bundle, CapturedMicroBatch, RankPart
    from ddpstats.capture.manifest import Manifest

_PRECISIONS = ("captured", "amp", "fp32", "fp64")
_AMP_DTYPES = ("bfloat16", "float16")
_SHOWN_FRAMES = 8
_SHOWN_NAMES = 5
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

T = TypeVar("T")


EPILOG = """example:
  ddpstats replay captures --model my_package:make_model --step my_package:step --bisect"""
EXIT_STATUS = "0 reproduced, 1 not reproduced, 2 it could not run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", help="a capture, or a directory of them (the newest complete one)")
    parser.add_argument("--model", required=True, metavar="PKG:FACTORY", help="called with nothing, makes the module")
    parser.add_argument("--step", required=True, metavar="PKG:FN", help="fn(model, batch) returns the loss")
    parser.add_argument("--rank", default="culprit", metavar="R", help="a rank, or culprit (default): the lowest one")
    parser.add_argument("--bisect", action="store_true", help="find the operation that made the first NaN or infinity")
    precisions = ", ".join(_PRECISIONS)
    parser.add_argument("--precision", choices=_PRECISIONS, default="captured", metavar="P", help=precisions)
    parser.add_argument("--amp-dtype", choices=_AMP_DTYPES, metavar="D", help="for --precision amp: bfloat16, float16")
    parser.add_argument("--device", metavar="D", help="cpu, cuda, ...; default: as captured, if there is one here")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="run N times from the same state")


def run(args: argparse.Namespace) -> int:
    """Replay, print the report, and return the exit status.

    Raises `BundleError` for the bundle, `ConfigError` for everything that keeps the step from running.
    """
    if args.repeat < 1:
        raise ConfigError(f"--repeat {args.repeat}: at least one run is needed")
    with stdout_to_stderr() if args.json else contextlib.nullcontext():
        facts = _replay(args)
    return print_report(0 if facts["reproduced"] else 1, args.json, lambda: _as_text(facts), lambda: facts)


def _replay(args: argparse.Namespace) -> dict[str, Any]:
    from ddpstats.capture.bundle import Bundle

    bundle = Bundle.open(args.bundle)
    part = bundle.rank_part(_rank(bundle, args.rank))
    parameters = bundle.parameters(part.rank)
    index = bundle.manifest.ranks.index(part.rank)  # of a group that need not begin at rank 0
    with _in_job(index, part.world_size) as collectives:
        factory, step = _import("--model", args.model), _import("--step", args.step)
        settings = _settings(args, part.device)  # on a device that torch may know from the program's own imports
        with _users_errors(f"--model {args.model}"):
            model = factory()
        replay = Replay(model, step, part, parameters, settings, not bundle.manifest.culprit_ranks)
        first: Outcome | None = None
        runs = list[RunFacts]()
        for _ in range(args.repeat):
            collectives.clear()  # the factory's own are not the step's
            outcome = replay.run()
            first = first or outcome
            runs.append(_facts_of_run(bundle.manifest, replay, settings, first, outcome))
            del outcome  # before the next run: it holds gradients on the device
        assert first is not None
        facts = _facts(bundle, replay, settings, first, runs) | {"collectives": dict(collectives), "bisect": None}
        if args.bisect:
            from ddpstats.capture.bisect import bisect

            facts["bisect"] = bisect(replay)
    return facts


def _rank(bundle: Bundle, wanted: str) -> int:
    if wanted == "culprit":
        present, culprits = bundle.manifest.ranks_present, bundle.manifest.culprit_ranks
        return [*(rank for rank in culprits if rank in present), *present, *bundle.manifest.ranks][0]
    if not wanted.isdecimal():
        raise ConfigError(f"--rank {wanted!r}: a rank's number, or culprit")
    return int(wanted)


def _settings(args: argparse.Namespace, captured_on: str) -> RunSettings:
    """Return how to run. What was captured on a device that this machine lacks runs on the CPU."""
    import torch

    from ddpstats._rerun.run import RunSettings

    if args.amp_dtype is not None and args.precision != "amp":
        raise ConfigError(f"--amp-dtype {args.amp_dtype} needs --precision amp")
    dtype = None if args.amp_dtype is None else getattr(torch, args.amp_dtype)
    try:
        device = torch.device(args.device or torch.device(captured_on).type)
        torch.empty(0, device=device).cpu()  # "meta" has no values
    except (RuntimeError, AssertionError, ImportError) as error:
        if args.device is not None:
            raise ConfigError(f"--device {args.device}: torch cannot use it here: {first_line(error)}") from None
        device = torch.device("cpu")
    return RunSettings(device, args.precision, dtype)


# -- the job, of which this process is one rank -----------------------------------------------------------------------


@contextlib.contextmanager
def _in_job(rank: int, world_size: int) -> Iterator[collections.Counter[str]]:
    """Run as one rank of the job: its process group, torchrun's variables; yield how often each collective was called.

    LOCAL_RANK is 0: this process is alone on its machine. Raises `ConfigError` where there is a process group already.
    """
    import torch.distributed as dist

    from ddpstats._observe import collectives
    from ddpstats._observe.groups import start_fake_group

    if dist.is_available() and dist.is_initialized():
        raise ConfigError("this process has a process group already; run `ddpstats replay` as a process of its own")
    echo = _Echo()
    before = dict(os.environ), list(sys.path), sys.excepthook  # torch puts its own hook there
    numbers = {"RANK": rank, "GROUP_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    sys.path.insert(0, os.getcwd())
    collectives.subscribe(echo)
    try:
        start_fake_group(rank, world_size)
        yield echo.counts
    finally:
        collectives.unsubscribe(echo)
        if dist.is_initialized():  # the user's step may have destroyed it
            dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(before[0])
        sys.path[:], sys.excepthook = before[1:]


class _Echo:
    """Completes what torch's "fake" backend answers: every other rank does and holds what this one does and holds.

    The backend itself gathers and broadcasts that way. It leaves sums as this rank's values, and does not know which
    piece the other ranks send to this one.
    """

    def __init__(self) -> None:
        self.counts = collections.Counter[str]()

    def before(self, call: Collective) -> None:
        if call.operator.is_message:
            raise ConfigError(f"the step calls {call.op}: a replay has one rank only, without a peer; leave it out")
        if call.operator.combines and call.reduce_op not in ("sum", "product", "avg", "min", "max", "band", "bor"):
            raise ConfigError(
                f"the step calls {call.op} with the reduction {call.reduce_op}, which one rank alone cannot answer; "
                "torch before 2.10 does not report the reduce op"
            )
        self.counts[call.op] += 1

    def after(self, call: Collective, work: Any) -> None:
        import torch

        size = len(call.view.ranks)
        with torch.no_grad():
            for piece, output in _pieces(call, size):
                rows = min(len(piece), len(output))  # the capture's ranks may have sent pieces of other sizes
                output[:rows].copy_(piece[:rows])
            for output in call.outputs:
                if call.reduce_op == "sum":
                    output.copy_(output * size)
                elif call.reduce_op == "product":
                    output.copy_(output**size)

    def before_wait(self, work: Any, limited: bool) -> bool:
        return False

    def after_wait(self, work: Any, error: RuntimeError | None) -> None:
        pass


def _pieces(call: Collective, size: int) -> Iterable[tuple[Tensor, Tensor]]:
    """Return what each rank sends to this one, and where it goes, for collectives that send each rank a piece."""
    operator, rank = call.operator, call.view.rank
    if call.splits is not None:
        sent, received = call.splits
        return [(call.inputs[0].split(sent)[rank], output) for output in call.outputs[0].split(received)]
    if call.inputs and (operator.compared == "pieces" or call.op == "reduce_scatter"):
        piece = call.inputs[0 if operator.to_root else rank]
        return [(piece.reshape(-1), output.view(-1)) for output in call.outputs]
    if call.op.startswith("reduce_scatter"):
        pairs = zip(call.inputs, call.outputs, strict=True)
        return [(whole.reshape(-1).chunk(size)[rank], output.view(-1)) for whole, output in pairs]
    return ()


# -- the user's code --------------------------------------------------------------------------------------------------


def _import(option: str, target: str) -> Callable[..., Any]:
    name, _, attribute = target.partition(":")
    if not (name and attribute):
        raise ConfigError(f"{option} {target!r}: a module and a name in it, as in package.module:function")
    with _users_errors(f"{option} {target}"):
        value: Any = importlib.import_module(name)
    for inner in attribute.split("."):
        value = getattr(value, inner, None)
    if not callable(value):
        raise ConfigError(f"{option} {target}: {name} has no function {attribute!r}")
    return value  # type: ignore[no-any-return]


@contextlib.contextmanager
def _users_errors(what: str) -> Iterator[None]:
    """Turn what the user's code raises into a `ConfigError` with the user's own traceback."""
    try:
        yield
    except (ConfigError, BundleError):
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{what} raised:\n{_trace(error)}") from error


def _trace(error: BaseException) -> str:
    """Return the error and its innermost frames, without those of ddpstats and importlib."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_OWN) and "importlib" not in frame.filename
    ]
    lines = traceback.format_list(frames[-_SHOWN_FRAMES:]) + traceback.format_exception_only(error)
    return "".join(lines).rstrip()


# -- one step, run again ----------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """The result of one run.

    Attributes:
        tensors: name -> tensor: the losses and norms of the micro-batches that ran, and the gradients that arrived in
            the last one, in parts where they are sparse (`parts_of`).
        nonfinite: parameters whose gradient was not finite after some micro-batch.
        error: what the step raised, as the capture's step did.
    """

    tensors: dict[str, dict[str, Tensor]]
    nonfinite: list[str] = field(default_factory=list)
    error: str | None = None

    def is_same(self, second: Outcome) -> bool:
        """Return whether two runs came to the same result, in every bit."""
        return (self.nonfinite, self.error) == (second.nonfinite, second.error) and all(
            tensors.keys() == second.tensors[kind].keys() and _difference(tensors, second.tensors[kind]) is None
            for kind, tensors in self.tensors.items()
        )


class Replay:
    """A captured step and a module to run it on. Local.

    Args:
        model: from the user's factory; it is changed.
        step: the user's ``fn(model, batch)``.
        part: the rank's part of the bundle.
        parameters: by name.
        has_no_culprit: the capture names no rank.

    Attributes:
        part: the rank's part, with names as if nothing had gone through torch.compile.
        is_unseen: no rank saw its own gradients, as under FSDP2, or of a backward pass outside of `micro_batch`.
        notes: what the reader of a result should know.

    Raises:
        ConfigError: the module is not the one of the capture; the message names what differs.
        BundleError: a batch is not in the bundle.
    """

    def __init__(
        self,
        model: nn.Module,
        step: StepFunction,
        part: RankPart,
        parameters: dict[str, Tensor],
        settings: RunSettings,
        has_no_culprit: bool = False,
    ) -> None:
        from torch import nn

        from ddpstats._rerun.run import Runner

        if not isinstance(model, nn.Module):
            raise ConfigError(f"--model returned a {type(model).__name__}, not a torch.nn.Module")
        self.part, self.model, self._settings = _with_plain_names(part), model, settings
        self.is_unseen = has_no_culprit and all(micro.norms is None for micro in part.micro_batches)
        self._parameters = _plain(parameters.items())
        self._runner = Runner(model, step, "--step", settings, f"rank {part.rank}")
        self.notes = self._check_batches() + _adapt(model, settings.device)
        self._check_model()

    def named_parameters(self) -> dict[str, nn.Parameter]:
        return _plain(self.model.named_parameters())

    def named_buffers(self) -> dict[str, Tensor]:
        return _plain(self.model.named_buffers())

    def run(self, search: Search | None = None) -> Outcome:
        """Run the step once, from the captured state. Raises `ConfigError` for an error that the capture did not raise.

        With ``search``, such an error is a part of the outcome: the step may not like to be looked at.
        """
        from ddpstats._rerun.state import as_in

        self._restore()
        outcome = Outcome({"losses": {}, "norms": {}, "gradients": {}})
        with as_in(self.part.environment):
            for index, micro in enumerate(self.part.micro_batches):
                try:
                    self._run_micro_batch(index, micro, outcome, search)
                except (ConfigError, BundleError):
                    raise
                except SystemExit as error:
                    raise ConfigError(f"--step ended the process, with status {error.code!r}") from error
                except Exception as error:
                    outcome.error = f"{type(error).__name__}: {error}"
                    captured = self.part.error or ""
                    if search is None and captured.partition(":")[0] != type(error).__name__:
                        why = f"; the capture raised {captured}" if captured else ""
                        raise ConfigError(
                            f"--step raised what the capture did not, in micro-batch {index}{why}:\n{_trace(error)}"
                        ) from error
                    break
        return outcome

    @calls_step
    def _run_micro_batch(self, index: int, micro: CapturedMicroBatch, outcome: Outcome, search: Search | None) -> None:
        from ddpstats._observe.gradient_norms import elements, held_values, measure, parts_of

        batch, named, tensors = self._runner.batch(micro), self.named_parameters(), outcome.tensors
        arrived, has_backward = set[str](), micro.norms is not None or self.is_unseen or self.part.error is not None
        watching = search.watch(index, batch) if search else contextlib.nullcontext()
        with contextlib.ExitStack() as hooks, self._runner.restore_state(micro), watching:
            for name, parameter in named.items():
                if parameter.requires_grad:
                    hook: Any = parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived.add(name))  # type: ignore[no-untyped-call]
                    hooks.callback(hook.remove)
            loss = self._runner.loss(micro, batch)
            tensors["losses"][f"micro-batch {index}"] = loss.detach().clone().flatten()
            if has_backward:
                self._runner.scale_loss(loss, self.part.scale).backward()  # type: ignore[no-untyped-call]
        gradients = {name: value.grad for name, value in named.items() if value.grad is not None}
        if has_backward:
            norms = measure([gradients[name] if name in arrived else None for name in named])
            tensors["norms"] |= {f"micro-batch {index}: {name}": norm for name, norm in zip(named, norms, strict=True)}
            parts = [parts_of(name, gradient) for name, gradient in gradients.items() if name in arrived]
            tensors["gradients"] = {name: part for by_name in parts for name, part in by_name.items()}
            bad = [name for name, gradient in gradients.items() if not bool(elements(gradient).isfinite().all())]
            outcome.nonfinite += [name for name in bad if name not in outcome.nonfinite]
        if search is not None:
            search.look(index, loss, {name: held_values(gradient) for name, gradient in gradients.items()})

    def _check_batches(self) -> list[str]:
        micro_batches, notes = self.part.micro_batches, []
        if not micro_batches:
            raise ConfigError(f"rank {self.part.rank} had no batch in this step; choose another with --rank")
        for index, micro in enumerate(micro_batches):
            if micro.batch_missing is not None:
                raise BundleError(
                    f"rank {self.part.rank}: the batch of micro-batch {index} is not in the bundle: "
                    f"{micro.batch_missing}. Nothing can be replayed without it; choose another rank, or capture again."
                )
            if micro.changed:
                changed = shorten(micro.changed, _SHOWN_NAMES)
                notes.append(f"micro-batch {index}: {changed} was changed in place; the replay gets the changed values")
        return notes

    def _check_model(self) -> None:
        buffers = self.named_buffers()
        captured = _shapes(self._parameters | (self.part.buffers or buffers))  # it has none before a forward pass
        built = _shapes({**self.named_parameters(), **buffers})
        lines = [
            f"  {name}: {captured.get(name, 'nothing')} captured, {built.get(name, 'nothing')} in the module"
            for name in captured | built
            if captured.get(name) != built.get(name)
        ]
        if lines:
            raise ConfigError(
                "--model makes another module than the captured one. Let it make the module as it was trained, without "
                "DistributedDataParallel around it:\n" + "\n".join(lines[:_SHOWN_NAMES])
            )

    def _restore(self) -> None:
        from ddpstats._rerun.run import WIDER

        device, dtype = self._settings.device, WIDER.get(self._settings.precision)
        frozen, eval_modules = set(self.part.frozen), set(self.part.eval_modules)

        def move(value: Tensor) -> Tensor:
            """Return a copy: a step may change its module."""
            return value.detach().to(device, dtype if value.is_floating_point() else None, copy=True)

        for name, parameter in self.named_parameters().items():
            parameter.requires_grad_(False)  # which integers cannot be given to otherwise
            _put_into(parameter, move(self._parameters[name]))
            can_have = parameter.is_floating_point() or parameter.is_complex()
            parameter.requires_grad_(can_have and name not in frozen)
            parameter.grad = None
        for name, buffer in self.named_buffers().items():
            _put_into(buffer, move(self.part.buffers.get(name, buffer)))
        for name, module in self.model.named_modules():  # with both names of what torch.compile wrapped
            module.training = _plain_name(name) not in eval_modules


def _put_into(tensor: Tensor, value: Tensor) -> None:
    """Give a tensor of the module the values, dtype and device of ``value``; it stays the same object."""
    import torch

    try:
        tensor.data = value
    except RuntimeError:  # on a device of a plugin tensors are of another kind than on the CPU
        made = torch.nn.Parameter(value, requires_grad=False) if isinstance(tensor, torch.nn.Parameter) else value
        vars(made).update(vars(tensor))
        torch.utils.swap_tensors(tensor, made)  # type: ignore[no-untyped-call]


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _plain_name(name: str) -> str:
    """Return the name without the module that torch.compile puts around another."""
    return ".".join(step for step in name.split(".") if step != "_orig_mod")


def _plain(named: Iterable[tuple[str, T]]) -> dict[str, T]:
    return {_plain_name(name): value for name, value in named}


def _with_plain_names(part: RankPart) -> RankPart:
    return replace(
        part,
        parameter_names=list(map(_plain_name, part.parameter_names)),
        buffers=_plain(part.buffers.items()),
        frozen=list(map(_plain_name, part.frozen)),
        eval_modules=list(map(_plain_name, part.eval_modules)),
        gradients=None if part.gradients is None else _plain(part.gradients.items()),
    )


def _adapt(model: nn.Module, device: torch.device) -> list[str]:
    """Stop DDP and SyncBatchNorm from communicating, as if all ranks held the same. Return notes."""
    from torch import nn

    notes = []
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            module.require_backward_grad_sync = False  # its own way to reduce nothing: equal gradients need no mean
        if isinstance(module, nn.SyncBatchNorm) and device.type == "cpu":
            module.forward = types.MethodType(nn.BatchNorm1d.forward, module)  # type: ignore[method-assign]
            notes = ["SyncBatchNorm normalizes over this rank's batch alone: torch has none for the CPU"]
    return notes


# -- the report -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunFacts:
    """The result of one run, without its tensors. ``is_identical``: to the first run, in every bit."""

    reproduced: bool
    is_identical: bool
    nonfinite: list[str]
    comparison: dict[str, str]


def _facts_of_run(
    manifest: Manifest, replay: Replay, settings: RunSettings, first: Outcome, outcome: Outcome
) -> RunFacts:
    comparison = _compare(replay.part, outcome, settings)
    has_overflow = manifest.reason == "overflow" and comparison["norms"] == "equal"
    reproduced = bool(outcome.nonfinite) or has_overflow
    if manifest.reason == "exception":
        reproduced = outcome.error is not None
    is_same = outcome is first or first.is_same(outcome)
    return RunFacts(reproduced, is_same, outcome.nonfinite, comparison)


def _facts(
    bundle: Bundle, replay: Replay, settings: RunSettings, first: Outcome, runs: list[RunFacts]
) -> dict[str, Any]:
    """Return what the report says, as JSON has it: losses are text there, because it has no NaN."""
    manifest, part = bundle.manifest, replay.part
    bad = set(map(_plain_name, manifest.parameters.get(part.rank, [])))
    return {
        "bundle": bundle.path.name,
        "reason": manifest.reason,
        "step": manifest.step,
        "rank": part.rank,
        "world_size": part.world_size,
        "micro_batches": len(part.micro_batches),
        "parameters": len(part.parameter_names),
        "captured_on": part.device,
        "device": str(settings.device),
        "precision": settings.precision,
        "reproduced": any(run.reproduced for run in runs),
        "runs": len(runs),
        "reproduced_runs": sum(run.reproduced for run in runs),
        "runs_identical": all(run.is_identical for run in runs),
        "nonfinite_then": None if replay.is_unseen else [name for name in part.parameter_names if name in bad],
        "nonfinite_now": list(dict.fromkeys(name for run in runs for name in run.nonfinite)),
        "error_then": part.error,
        "error_now": first.error,
        "losses": [_value(loss) for loss in first.tensors["losses"].values()],
        "bit_for_bit": runs[0].comparison,
        "notes": [*bundle.notes, *_notes(bundle, part, settings), *replay.notes],
    }


def _notes(bundle: Bundle, part: RankPart, settings: RunSettings) -> list[str]:
    import torch

    notes, culprits = [], bundle.manifest.culprit_ranks
    written = bundle.manifest.versions.get("torch")
    if written != torch.__version__:
        notes.append(f"captured with torch {written}, replayed with {torch.__version__}: last bits may differ")
    if part.device.partition(":")[0] != settings.device.type:  # torch need not know that device here
        notes.append(f"captured on {part.device}, replayed on {settings.device}: last bits differ, and random numbers")
    if culprits and part.rank not in culprits:
        notes.append(f"rank {part.rank} is not a culprit ({shorten(culprits, 8)}): its own gradients were finite")
    return notes


def _compare(part: RankPart, outcome: Outcome, settings: RunSettings) -> dict[str, str]:
    """Return "equal", "differ: ..." or "not compared: ..." for the losses, the norms and the gradients."""
    from ddpstats._observe.gradient_norms import norm_kind

    captured: dict[str, dict[str, Tensor]] = {"losses": {}, "norms": {}, "gradients": part.gradients or {}}
    for index, micro in enumerate(part.micro_batches):
        if micro.loss is not None:
            captured["losses"][f"micro-batch {index}"] = micro.loss.flatten()
        if micro.norms is not None:
            norms = zip(part.parameter_names, micro.norms, strict=True)
            captured["norms"] |= {f"micro-batch {index}: {name}": norm for name, norm in norms}
    result = {}
    for kind, tensors in captured.items():
        if settings.precision != "captured":
            result[kind] = f"not compared: --precision {settings.precision}"
        elif not tensors:
            result[kind] = "not compared: the capture has none"
        elif kind == "norms" and norm_kind(settings.device) != part.norm:
            result[kind] = f"not compared: {part.norm}-norms were captured, {settings.device} measures others"
        else:
            difference = _difference(tensors, outcome.tensors[kind])
            result[kind] = "equal" if difference is None else f"differ: {difference}"
    return result


def _difference(then: dict[str, Tensor], now: dict[str, Tensor]) -> str | None:
    texts = [
        f"{name}: {_value(tensor)} then, {_value(now.get(name))} now"
        for name, tensor in then.items()
        if not is_same(tensor, now.get(name))
    ]
    return shorten(texts, 1) if texts else None


def _value(tensor: Tensor | None) -> str:
    if tensor is None:
        return "nothing"
    return repr(tensor.item()) if tensor.numel() == 1 else f"a tensor of shape {tuple(tensor.shape)}"


def is_same(a: Tensor, b: Tensor | None) -> bool:
    """Return whether shape, dtype and every bit are the same; NaN is NaN."""
    import torch

    if b is None or a.dtype != b.dtype or a.shape != b.shape:
        return False
    a, b = a.detach().cpu(), b.detach().cpu()
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    same = (a == b) & (a.signbit() == b.signbit()) | (a.isnan() & b.isnan())
    return bool(same.all())


def _as_text(facts: dict[str, Any]) -> str:
    then, now = facts["nonfinite_then"], facts["nonfinite_now"]
    what = f"gradients of {len(now)} of {facts['parameters']} parameters not finite"
    if facts["error_then"] is not None:
        what = f"the capture raised {facts['error_then']}"
    elif facts["reason"] == "overflow":
        what = "the sum of finite gradients was not finite, which no rank alone shows; its norms are compared"
    lines = [
        f"{facts['bundle']}: {facts['reason']} in step {facts['step']}",
        f"rank {facts['rank']} of {facts['world_size']}, {count_of(facts['micro_batches'], 'micro-batches')}, captured "
        f"on {facts['captured_on']}, replayed on {facts['device']}, precision {facts['precision']}",
        *(f"note: {note}" for note in facts["notes"]),
        "",
        f"{'reproduced' if facts['reproduced'] else 'not reproduced'}: {what}",
        f"  not finite then: {'not known' if then is None else shorten(then, _SHOWN_NAMES) or 'none'}",
        f"  not finite now:  {shorten(now, _SHOWN_NAMES) or 'none'}",
        f"  losses now:      {shorten(facts['losses'], _SHOWN_NAMES)}",
    ]
    if facts["error_now"] is not None:
        lines.append(f"  raised now:      {facts['error_now']}")
    lines.append("bit for bit, against the capture:")
    lines += [f"  {name:9} {comparison}" for name, comparison in facts["bit_for_bit"].items()]
    if facts["runs"] > 1:
        runs = "the runs are equal in every bit"
        if not facts["runs_identical"]:
            runs = "the result differs between runs: a race or transient fault, or a nondeterministic operation"
        lines.append(f"reproduced in {facts['reproduced_runs']} of {facts['runs']} runs; {runs}")
    if facts["collectives"]:
        counts = ", ".join(f"{name} {count}" for name, count in sorted(facts["collectives"].items()))
        lines.append(
            f"collectives were replaced by this rank's own values ({counts}): results are not those of the job"
        )
    if facts["bisect"] is not None:
        from ddpstats.capture.bisect import as_text

        lines += ["", as_text(facts["bisect"])]
    return "\n".join(lines)

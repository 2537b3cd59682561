"""``ddpstats replay BUNDLE``: the step that was captured, run again in this one process.

1. Open the bundle, which executes nothing, and choose a rank: the lowest culprit that is there.
2. Import the user's factory and step function; the current directory is importable, as it is for ``python -m``.
3. Build the module under a process group in which every other rank does what this one does (`_echo_group`).
4. Run the step (`_rerun`), as often as ``--repeat`` says, and compare with the capture (`outcome`).
5. With ``--bisect``, run it once more and look at every operation (`bisect`).

Exit status 0 if what was captured happened again, 1 if it did not, 2 if it could not be run. torch is imported when
something is run, so that ``--help`` is quick.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ddpstats._base.text import VerbReport
from ddpstats.errors import BundleError, ConfigError

if TYPE_CHECKING:
    import torch

    from ddpstats._rerun.run import RunSettings
    from ddpstats.capture.bundle import Bundle
    from ddpstats.capture.outcome import Replayed
    from ddpstats.capture.parts import RankPart
    from ddpstats.capture.rerun import Outcome, Rerun

_PRECISIONS = ("captured", "amp", "fp32", "fp64")
_AMP_DTYPES = ("bfloat16", "float16")
_SHOWN_FRAMES = 8
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


EPILOG = """example:
  ddpstats replay captures --model my_package:make_model --step my_package:step --bisect

exit status: 0 reproduced, 1 not reproduced, 2 it could not run"""


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
    """Raises `BundleError` for the bundle, `ConfigError` for everything else that keeps it from running."""
    if args.repeat < 1:
        raise ConfigError(f"--repeat {args.repeat}: at least one run is needed")
    with _stdout_to_stderr() if args.json else contextlib.nullcontext():
        replayed = _replay(args)
    from ddpstats.capture.outcome import as_json, as_text

    status = 0 if any(replayed.reproduced) else 1
    return VerbReport(status, lambda: as_text(replayed), lambda: as_json(replayed)).show(args.json)


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """A step that prints must not spoil the one JSON object: neither in Python nor in C, which knows only numbers."""
    sys.stdout.flush()
    try:
        saved = os.dup(1)
    except OSError:  # a process without a stdout
        saved = None
    try:
        if saved is not None:
            os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        if saved is not None:
            _flush_c()
            os.dup2(saved, 1)
            os.close(saved)


def _flush_c() -> None:
    """What C's own buffer holds goes where it was written to."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).fflush(None)


def _replay(args: argparse.Namespace) -> Replayed:
    from ddpstats.capture._echo_group import echoing
    from ddpstats.capture.bundle import Bundle

    bundle = Bundle.open(args.bundle)
    part = bundle.rank_part(_rank(bundle, args.rank))
    parameters = bundle.parameters(part.rank)
    settings = _settings(args, part)
    position = bundle.manifest.ranks.index(part.rank)  # of a group that need not begin at rank 0
    with _current_directory_first(), echoing(position, part.world_size) as collectives:
        rerun = _rerun(args, bundle, part, parameters, settings)
        collectives.clear()  # the factory's own are not the step's
        outcomes = [_ran(rerun, part) for _ in range(args.repeat)]
        counted = {name: count // args.repeat for name, count in collectives.items()}
        bisected = None
        if args.bisect:
            from ddpstats.capture.bisect import bisect

            bisected = bisect(rerun)
    return _judged(bundle, rerun.part, settings, rerun, outcomes, counted, bisected)


def _rank(bundle: Bundle, wanted: str) -> int:
    present = bundle.manifest.ranks_present
    if wanted == "culprit":
        culprits = [rank for rank in bundle.manifest.culprit_ranks if rank in present]
        if not (culprits or present):
            raise BundleError(f"{bundle.path} holds no rank's part: nothing can be replayed")
        return (culprits or list(present))[0]
    if not wanted.isascii() or not wanted.isdecimal():
        raise ConfigError(f"--rank {wanted!r}: a rank's number, or culprit")
    return int(wanted)


def _settings(args: argparse.Namespace, part: RankPart) -> RunSettings:
    import torch

    from ddpstats._rerun.run import RunSettings

    if args.amp_dtype is not None and args.precision != "amp":
        raise ConfigError(f"--amp-dtype {args.amp_dtype} needs --precision amp")
    dtype = None if args.amp_dtype is None else getattr(torch, args.amp_dtype)
    return RunSettings(_device(args.device, part.device), args.precision, dtype)


def _device(wanted: str | None, captured: str) -> torch.device:
    import torch

    try:
        device = torch.device(wanted if wanted is not None else captured)
    except RuntimeError as error:
        raise ConfigError(f"--device {wanted}: {str(error).splitlines()[0]}") from None
    if device.type == "cpu" or _is_here(device):
        return torch.device(device.type) if wanted is None else device
    if wanted is None:
        return torch.device("cpu")
    raise ConfigError(f"--device {wanted}: this machine has none that torch can use; leave it out, or use cpu")


def _is_here(device: torch.device) -> bool:
    import torch

    try:
        return bool(torch.get_device_module(device).is_available())
    except (RuntimeError, AttributeError):
        return False


def _rerun(
    args: argparse.Namespace, bundle: Bundle, part: RankPart, parameters: dict[str, torch.Tensor], settings: RunSettings
) -> Rerun:
    from torch import nn

    from ddpstats.capture.rerun import Rerun

    factory, step = _imported("--model", args.model), _imported("--step", args.step)
    with _users_errors(f"--model {args.model}"):
        model = factory()
    if not isinstance(model, nn.Module):
        raise ConfigError(f"--model {args.model} returned a {type(model).__name__}, not a torch.nn.Module")
    return Rerun(model, step, part, parameters, settings, raises=bundle.manifest.reason == "exception")


def _ran(rerun: Rerun, part: RankPart) -> Outcome:
    outcome = rerun.run()
    if outcome.error is not None and not _is_the_captured(outcome.error, part.error):
        expected = "" if part.error is None else f"; the capture raised {part.error}"
        raise ConfigError(
            f"--step raised what the capture did not, in micro-batch {outcome.raised_in}{expected}:\n"
            f"{_trace(outcome.error)}{_missing_package(outcome.error)}"
        ) from outcome.error
    return outcome


def _is_the_captured(error: Exception, captured: str | None) -> bool:
    """``captured`` begins with the type's name, perhaps after a traceback."""
    if captured is None:
        return False
    names = {line.partition(":")[0].rpartition(".")[2].strip() for line in captured.splitlines() if line[:1].strip()}
    return type(error).__name__ in names


def _judged(
    bundle: Bundle,
    part: RankPart,
    settings: RunSettings,
    rerun: Rerun,
    outcomes: list[Outcome],
    collectives: dict[str, int],
    bisected: Any,
) -> Replayed:
    from ddpstats.capture.outcome import Replayed, compare

    names = [name for name, _ in rerun.model.named_parameters()]
    comparisons = [compare(part, outcome, settings, names) for outcome in outcomes]
    reason = bundle.manifest.reason
    reproduced = [
        _is_reproduced(reason, part, outcome, comparison.norms == "equal")
        for outcome, comparison in zip(outcomes, comparisons, strict=True)
    ]
    return Replayed(
        bundle=bundle.path.name,
        manifest=bundle.manifest,
        part=part,
        settings=settings,
        notes=[*bundle.notes, *_notes(bundle, part, settings), *rerun.notes],
        outcomes=outcomes,
        reproduced=reproduced,
        comparison=comparisons[0],
        collectives=collectives,
        bisected=bisected,
    )


def _is_reproduced(reason: str, part: RankPart, outcome: Outcome, norms_equal: bool) -> bool:
    if reason == "exception":
        return outcome.error is not None  # another one than the captured has ended the replay already
    if reason == "overflow":
        return bool(outcome.nonfinite) or norms_equal
    return bool(outcome.nonfinite)


def _notes(bundle: Bundle, part: RankPart, settings: RunSettings) -> list[str]:
    import torch

    found = []
    written = bundle.manifest.versions.get("torch", torch.__version__)
    if written != torch.__version__:
        found.append(f"captured with torch {written}, replayed with {torch.__version__}: last bits may differ")
    if torch.device(part.device).type != settings.device.type:
        found.append(f"captured on {part.device}, replayed on {settings.device}: last bits differ, and random numbers")
    if part.rank not in bundle.manifest.culprit_ranks and bundle.manifest.culprit_ranks:
        culprits = ", ".join(map(str, bundle.manifest.culprit_ranks))
        found.append(f"rank {part.rank} is none of the culprits ({culprits}): its own gradients were finite")
    return found


# -- the user's code --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _current_directory_first() -> Iterator[None]:
    before = list(sys.path)
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path[:] = before


def _imported(option: str, target: str) -> Callable[..., Any]:
    name, colon, attribute = target.partition(":")
    if not (name and colon and attribute):
        raise ConfigError(f"{option} {target!r}: a module and a name in it, as in package.module:function")
    with _users_errors(f"{option} {target}"):
        found: Any = importlib.import_module(name)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{option} {target}: {name} has no {attribute!r}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{option} {target}: that is a {type(found).__name__}, which cannot be called")
    return found  # type: ignore[no-any-return]


@contextlib.contextmanager
def _users_errors(what: str) -> Iterator[None]:
    """What the user's code raises becomes a `ConfigError` with his own traceback."""
    try:
        yield
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{what} raised:\n{_trace(error)}{_missing_package(error)}") from error


def _missing_package(error: BaseException) -> str:
    """A line that says so, where a module is not there."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return ""
    name = error.name.partition(".")[0]
    return (
        f"\nThere is no module {error.name} here. If it is of a package: pip install {name}; if it is of your program: "
        "run this where it can be imported."
    )


def _trace(error: BaseException) -> str:
    """The innermost frames, without ours and importlib's."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_OWN + os.sep) and "importlib" not in frame.filename
    ]
    lines = traceback.format_list(frames[-_SHOWN_FRAMES:]) + traceback.format_exception_only(type(error), error)
    return "".join(lines).rstrip()

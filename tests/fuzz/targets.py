"""Readers of foreign bytes, as functions of bytes alone, for `test_fuzz`.

Each target takes any bytes, lets our readers have them, and returns. A reader may refuse with the error that it
documents; any other error is a finding. The first byte chooses among the readers of a target. Seeds are
what honest writers write: the files of `tests/formats`, and messages of every kind.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch

from ddpstats import Max, report as report_verb
from ddpstats._ranks.exchange import Call, Status, decode_status, encode_status
from ddpstats._ranks.failure import ProcessId, Verdict
from ddpstats._ranks.gather import decode, encode
from ddpstats._reduction.flatten import decode as decode_schema, flatten
from ddpstats._rerun.codec import from_bytes, from_plain, to_bytes, to_plain
from ddpstats._rerun.record import PackedStep, Packet
from ddpstats._rerun.run import Runner, RunSettings
from ddpstats._rerun.state import Autocast, RandomState
from ddpstats.capture.bundle import Bundle
from ddpstats.dump.analyze import compare, nan_origin, open_rank
from ddpstats.dump.analyze.tensors import load_tensor
from ddpstats.dump.config import read_config
from ddpstats.dump.msprobe import common_names, common_values, read_collective
from ddpstats.errors import BundleError, ConfigError, DdpstatsError, DumpError, ProtocolMismatch
from ddpstats.guard.diagnosis import Alarm, GuardFinding, RankStatus
from ddpstats.guard.event import decode as decode_events
from ddpstats.guard.watch import Records, lines_of, picture_of

FORMATS = Path(__file__).parents[1] / "formats" / "v1"
CAPTURES = FORMATS.with_name("v2") / "captures"
CPU = torch.device("cpu")
LONGEST_BYTES = 1 << 16


class Target(NamedTuple):
    run: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]


@cache
def scratch() -> Path:
    """A directory of this process, with a copy of the files of `tests/formats`."""
    directory = Path(tempfile.mkdtemp(prefix="fuzz-"))
    shutil.copytree(FORMATS, directory / "v1")
    shutil.copytree(CAPTURES, directory / "v1" / "captures")
    return directory / "v1"


def leave() -> None:
    """Remove what `scratch` made."""
    shutil.rmtree(scratch().parent, ignore_errors=True)
    scratch.cache_clear()


# -- wire --------------------------------------------------------------------------------------------------------------

_READERS: Sequence[tuple[Callable[[bytes], Any], tuple[type[Exception], ...]]] = (
    (decode_schema, (ProtocolMismatch,)),
    (decode_status, (ProtocolMismatch,)),
    (decode, (ProtocolMismatch,)),
    (lambda data: decode(_with_json(encode([torch.arange(5), torch.ones(2, 2)]), data)), (ProtocolMismatch,)),
    (Verdict.unpack, (ValueError,)),
    (RankStatus.unpack, (ValueError,)),
    (GuardFinding.unpack, (ValueError,)),
    (Alarm.unpack, (ValueError,)),
    (lambda data: decode_events([(1, 0, data)]), ()),
    (lambda data: from_bytes(torch.tensor(list(data), dtype=torch.uint8), PackedStep, "the step"), (BundleError,)),
)


def wire(data: bytes) -> None:
    """Read what another rank sends in a collective, through the store or in shared memory."""
    read, legal = _READERS[data[0] % len(_READERS)] if data else _READERS[0]
    with contextlib.suppress(*legal):
        read(data[1:])


def _wire_seeds() -> list[bytes]:
    stats = {"a": 1.0, "b/c": [Max(1), (torch.ones(1, dtype=torch.float16), None)], 3: None}
    schema = flatten(stats, keep_dtypes=True).structure.encoded
    status = encode_status(Status(Call("reduce_stats", "train", "raise"), bytes(8), None, True, schema))
    tree = encode({"a": torch.arange(5), "b": [1.5, "x", (None, torch.ones(2, 2))]})
    event = {"group": "0", "seq": 3, "op": "all_reduce", "shapes": [[2]], "dtypes": ["float32"], "label": "loss"}
    event["evidence"] = ["k", ["k", "l"], "dict", "unused", "", [], False, False, "loop", None]
    finding = {"kind": "mismatch", "message": "m", "group": "0", "seq": 1, "missing": [1]}
    finding |= {"culprits": [], "doubts": [], "printer": 0}
    notes = {
        "rank": 0,
        "events": [event],
        "count": 3,
        "waits_in": ["0", 3, "x"],
        "last": "x",
        "left": None,
        "dead": False,
    }
    texts = [
        {"missing": [1, 2], "message": "text"},
        {**notes, "stack": None, "slept_sec": 7.5, "messages": []},
        {**finding, "by_rank": {"0": event}},
        {"group": "0", "words": "w", "ranks": [0, 1], "seq": 3, "overdue": True, "tentative": False},
        event,
        event,
    ]
    parts = [schema.encode(), status, tree, _json_in(tree)]
    packet = Packet(
        to_plain({"x": torch.ones(2)}), {"python": []}, Autocast("cpu", True, torch.bfloat16), torch.ones(1)
    )
    step = bytes(to_bytes(PackedStep((packet,), {"b": torch.ones(2)}, 1.0, {"threads": 2})).tolist())
    return [
        *(bytes([kind]) + part for kind, part in enumerate([*parts, *(json.dumps(text).encode() for text in texts)])),
        bytes([len(_READERS) - 1]) + step,
    ]


# -- bundle ------------------------------------------------------------------------------------------------------------


def bundle(data: bytes) -> None:
    """Read a manifest, a file of a bundle, or JSON in it, of which the manifest has the right checksum."""
    (directory,) = (scratch() / "captures").iterdir()
    kind, content = (data[0] % 4 if data else 0), data[1:]
    name = ("MANIFEST.json", "rank00000.safetensors", "rank00000.safetensors", "model.safetensors")[kind]
    if kind > 1:
        content = _with_json((CAPTURES / directory.name / name).read_bytes(), content)
    original = CAPTURES / directory.name
    (directory / name).write_bytes(content)
    if kind:
        manifest = json.loads((original / "MANIFEST.json").read_text())
        manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        (directory / "MANIFEST.json").write_text(json.dumps(manifest))
    try:
        with contextlib.suppress(BundleError):
            _use(Bundle.open(directory))
    finally:
        for file in ("MANIFEST.json", name):
            shutil.copyfile(original / file, directory / file)


def _use(opened: Bundle) -> None:
    """Do what a replay does, up to the user's own code."""
    for rank in opened.manifest.ranks_present[:4]:
        with contextlib.suppress(BundleError):
            opened.parameters(rank)
        part = opened.rank_part(rank)
        runner = Runner(torch.nn.Identity(), lambda module, batch: batch, "step", RunSettings(CPU), "rank 0")
        before = RandomState.take(CPU)
        for micro in part.micro_batches:
            from_plain(micro.batch)
            try:
                with runner.restore_state(micro):
                    pass
            finally:
                before.restore()


def _with_json(original: bytes, text: bytes) -> bytes:
    """Return a file, or what is gathered, with another JSON in it."""
    tensors = safetensors.torch.load(original)
    tensors["json"] = torch.frombuffer(bytearray(text or b" "), dtype=torch.uint8)
    return safetensors.torch.save(tensors)


def _json_in(original: bytes) -> bytes:
    return bytes(safetensors.torch.load(original)["json"].tolist())


def _bundle_seeds() -> list[bytes]:
    (directory,) = CAPTURES.iterdir()
    part, model = directory / "rank00000.safetensors", directory / "model.safetensors"
    manifest = (directory / "MANIFEST.json").read_bytes()
    return [
        b"\0" + manifest,
        b"\1" + part.read_bytes(),
        b"\2" + _json_in(part.read_bytes()),
        b"\3" + _json_in(model.read_bytes()),
    ]


# -- dump --------------------------------------------------------------------------------------------------------------

_TENSOR = "Tensor.sqrt.0.forward.input.0.pt"
_DUMPS = (("dump", "dump.json"), ("killed", "dump.jsonl"), ("dump", "stack.json"), ("dump", "construct.json"))


def dump(data: bytes) -> None:
    """Walk the entries of a dump with this file, look for the NaN, and compare it with the honest dump."""
    kind, content = (data[0] % 5 if data else 0), data[1:]
    where, name = _DUMPS[kind] if kind < len(_DUMPS) else ("dump", f"dump_tensor_data/{_TENSOR}")
    good, bad = FORMATS / where / "step0" / "rank", scratch() / where / "step0" / "rank"
    (bad / name).write_bytes(content)
    try:
        for read in (_walk, _origin, lambda path: _compared(path, good)):
            with contextlib.suppress(DumpError):
                read(bad)
    finally:
        shutil.copyfile(good / name, bad / name)


def _walk(path: Path) -> None:
    opened = open_rank(path)
    for entry in opened.entries():
        opened.stack_of(entry.name), opened.parent_of(entry.name)
        for _, value in entry.values(nulls=True):
            _ = (value.is_finite, value.has_nan, value.dtype, value.shape)
            if value.is_tensor and value.data_name is not None:
                load_tensor(opened, value)
        read_collective(entry, 0), common_values(entry)
    common_names((member.key for member in opened.entry_texts()), [])


def _origin(path: Path) -> None:
    with quiet():
        nan_origin.run(argparse.Namespace(directory=str(path), json=False))


def _compared(path: Path, good: Path) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    compare.add_arguments(parser)
    with quiet(), contextlib.suppress(ConfigError):
        compare.run(parser.parse_args([str(path), str(good)]))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def _dump_seeds() -> list[bytes]:
    files = [FORMATS / where / "step0" / "rank" / name for where, name in _DUMPS]
    files.append(FORMATS / "dump" / "step0" / "rank" / "dump_tensor_data" / _TENSOR)
    return [bytes([kind]) + path.read_bytes() for kind, path in enumerate(files)]


# -- record, config ----------------------------------------------------------------------------------------------------


def record(data: bytes) -> None:
    """Report one rank's record, beside an honest one of another rank, and watch both."""
    directory = scratch() / "records"
    (directory / "rank0.jsonl").write_bytes(data)
    with quiet(), contextlib.suppress(DdpstatsError):
        report_verb.run(
            argparse.Namespace(directories=[directory], json=bool(data[:1] > b"\x7f"), html=None, perfetto=None)
        )
    with contextlib.suppress(DdpstatsError):
        lines_of(picture_of(Records(directory).look()))


def _record_seeds() -> list[bytes]:
    """Return a record, and one that can be watched: its process is this one."""
    record = (FORMATS / "records" / "rank0.jsonl").read_bytes()
    now = {"steps": 3, "waits_since": 5.0, "renegotiations": "1", "not held any more": "k", "ALARM of guard": "text"}
    process = b'{"process":"%b",' % ProcessId.mine().pack().hex().encode()
    return [record, process + record[1:] + json.dumps({"now": now}).encode() + b"\n"]


def config(data: bytes) -> None:
    """Read the configuration of `ddpstats.StatsDump`."""
    path = scratch() / "config.json"
    path.write_bytes(data)
    with contextlib.suppress(ConfigError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # keys that have no effect
        read_config(path)


TARGETS = {
    "wire": Target(wire, _wire_seeds),
    "bundle": Target(bundle, _bundle_seeds),
    "dump": Target(dump, _dump_seeds),
    "record": Target(record, _record_seeds),
    "config": Target(config, lambda: [(FORMATS / "config.json").read_bytes()]),
}

"""The table of torch's collectives: one row is all that a new one needs, and what it does not know is refused."""

from __future__ import annotations

import inspect
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddpstats import collective_guard
from ddpstats._observe import collectives, groups
from ddpstats._observe.groups import group_of_one
from ddpstats._observe.operators import OPERATORS, Collective, operator_of
from ddpstats.dump.analyze import DumpEntry
from ddpstats.dump.msprobe import read_collective
from ddpstats.errors import ConfigError
from ddpstats.lint.lint import lint
from ddpstats.report.flight_recorder import read_dumps
from ddpstats.testing import RankPool
from tests.capabilities import needs_guard
from tests.observe import operator_runs as runs


@needs_guard
def test_a_new_collective_is_one_row(two_ranks: RankPool, tmp_path: Path) -> None:
    """Without it, torch is refused; with it, guard, record and dump describe the collective, and ranks are compared."""
    outcomes = two_ranks.run(runs.collective_that_is_new, str(tmp_path), timeout_sec=60).values()
    for refusal, mismatch, (recorded,), dumped in outcomes:
        assert "has a collective that ddpstats does not know, c10d::relay_" in refusal
        assert "rank 0: relay(float32[3], root=0)" in mismatch
        assert "rank 1: relay(float32[3], root=1)" in mismatch
        assert (recorded["op"], recorded["root"], recorded["shapes"]) == ("relay", 1, [[3]])
        assert dumped == [("Distributed.relay.0.forward", 1.0, 2.0)]


def test_its_row_is_known_to_what_reads_programs_and_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Lint, the reader of other tools' dumps and that of Flight Recorder's, all without an import of torch."""
    (tmp_path / "main.py").write_text("import torch.distributed as dist\nif rank == 0:\n    dist.relay(out, x, 0)\n")
    tensor = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [3], "Max": 1.0}
    number = {"type": "int", "value": 1}
    raw = {"input_args": [tensor, tensor, number], "input_kwargs": {}, "output": [tensor, tensor, number]}
    call = DumpEntry("Distributed.relay.0.forward", raw)
    (tmp_path / "trace_rank_0").write_bytes(pickle.dumps({"entries": [_recorded("nccl:relay")]}))

    def known() -> tuple[list[str], list[list[str]], bool, list[list[int]]]:
        entries = [read_collective(call, rank) for rank in (0, 1)]
        paths = [[path for path, _ in (*entry.inputs, *entry.outputs)] for entry in entries]
        ((record, _),) = read_dumps([tmp_path]).values()
        rules = [finding.rule for finding in lint([tmp_path / "main.py"]).findings]
        return rules, paths, entries[0].operator.has_equal_results, list(map(list, record.events[0].signature.shapes))

    everything = ["input.0", "input.1", "output.0", "output.1"]
    assert known() == ([], [everything, everything], False, [[4]])
    monkeypatch.setitem(OPERATORS, "relay_", runs.ROW)
    assert known() == (["rank-branch"], [["input.1"], ["input.1", "output.0"]], False, [[4]])
    monkeypatch.setitem(OPERATORS, "relay_", replace(runs.ROW, compared="pieces", to_root=False))
    assert known()[2:] == (False, [[5]])
    monkeypatch.setitem(OPERATORS, "relay_", replace(runs.ROW, to_root=False))
    assert known()[2:] == (True, [[4]])


def _recorded(name: str) -> dict[str, Any]:
    sizes = {"input_sizes": [[4]], "input_dtypes": ["Float"], "output_sizes": [[5]], "output_dtypes": ["Float"]}
    return {"process_group": ["0", ""], "profiling_name": name, "collective_seq_id": 1, "time_created_ns": 1, **sizes}


def test_parameters_of_the_table_are_those_of_torch() -> None:
    names = [
        (row, name) for row in OPERATORS.values() for name in (row.op, *row.aliases.split()) if hasattr(dist, name)
    ]
    assert len(names) > 20
    for row, name in names:
        parameters = list(inspect.signature(getattr(dist, name)).parameters)
        assert operator_of(name) is not row or parameters[: len(row.parameter_names)] == row.parameter_names, name


def test_a_function_of_two_names_has_one_row() -> None:
    """Later versions of torch give three of them new names, and keep the old ones."""
    for name, new_name in (("all_gather_into_tensor", "all_gather_single"), ("gather_into_tensor", "gather_single")):
        assert operator_of(new_name) is operator_of(name) is not None
    assert operator_of("reduce_scatter_single") is operator_of("reduce_scatter_tensor") is not None


def test_results_that_are_equal_on_all_ranks() -> None:
    assert {row.op for row in OPERATORS.values() if row.has_equal_results} == {
        *("all_reduce", "all_reduce_coalesced", "broadcast"),
        *("all_gather", "all_gather_coalesced", "all_gather_into_tensor"),
    }


@needs_guard
def test_only_what_torch_combines_is_called_gradients(two_ranks: RankPool, tmp_path: Path) -> None:
    """The length that ZeRO broadcasts, DDP's buffers and the parameters that FSDP gathers have no such label."""
    for labels in two_ranks.run(runs.labels_of_torchs_own, str(tmp_path), timeout_sec=60).values():
        assert {op for op, label in labels if label == "(gradients)"} == {"all_reduce", "reduce_scatter_tensor"}
        assert {op for op, label in labels if label is None} == {"broadcast", "all_gather_into_tensor"}


def test_methods_of_the_table_are_those_of_torch() -> None:
    """`count_collectives` counts them; a row whose method has another name would count nothing."""
    methods = {name for name in vars(dist.ProcessGroup) if not name.startswith("__")}
    known = {operator.name: operator for operator in collectives.check_operators()}
    known.pop("gather_into_tensor_", None)  # of torch 2.14, which was not at hand when the table was written
    for name, operator in known.items():
        assert methods & set(operator.method_names), name


def test_a_torch_that_does_not_name_reduce_ops_is_refused_by_the_guard_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "operators_name_reduce_op", False)
    with pytest.raises(ConfigError, match=f"needs torch 2.10 or newer, and this is torch {torch.__version__[:4]}"):
        collective_guard("strict").__enter__()
    assert not collectives._subscribers
    collectives.subscribe(seen := _Seen())
    with group_of_one("test") as only:
        only[0].allreduce([torch.ones(1)]).wait()
    collectives.unsubscribe(seen)
    assert seen.calls == [("all_reduce", None)]  # for a dump


class _Seen(collectives.Subscriber):
    def __init__(self) -> None:
        self.calls: list[tuple[str, str | None]] = []

    def before(self, call: Collective) -> None:
        self.calls.append((call.op, call.reduce_op))


class _Waiting(collectives.Subscriber):
    """Waits for every other collective that it sees."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def before(self, call: Collective) -> None:
        pass

    def after(self, call: Collective, work: Any) -> bool:
        self.events.append("issued")
        return self.events.count("issued") % 2 == 1 and bool(collectives.original_wait(work))

    def before_wait(self, work: Any, limited: bool) -> bool:
        self.events.append("waits")
        return False

    def after_wait(self, work: Any, error: RuntimeError | None) -> None:
        self.events.append("has waited")


def test_what_a_subscriber_has_waited_for_is_waited_for_once() -> None:
    """Until the next collective: a backend may return one object for all of them."""
    collectives.subscribe(seen := _Waiting())
    try:
        with group_of_one("test") as only:
            done = only[0].allreduce([torch.ones(1)], dist.AllreduceOptions())
            assert done.wait()
            assert only[0].allreduce([torch.ones(1)], dist.AllreduceOptions()).wait()
            assert done.wait()
    finally:
        collectives.unsubscribe(seen)
    assert seen.events == ["issued", "has waited", "issued", "waits", "has waited", "waits", "has waited"]


def test_the_hash_of_a_reduce_op_is_the_number_by_which_it_is_named() -> None:
    for name, kind in dist.ReduceOp.RedOpType.__members__.items():
        if name != "PREMUL_SUM":  # which another function makes
            assert collectives.reduce_op_name(hash(dist.ReduceOp(kind))) == name.lower()


@pytest.mark.parametrize("name", ["allgather_", "reduce_scatter_", "allgather_coalesced_"])
def test_lists_of_lists_are_read_as_one_list(name: str) -> None:
    read = collectives.reader_of(OPERATORS[name])
    single, pair = torch.zeros(1), torch.zeros(2)
    nested, flat = [[single], [pair]], [pair]
    outer, inner = (flat, nested) if name == "reduce_scatter_" else (nested, flat)
    call = read([outer, inner, None, _Sum(), True, -1], None)  # type: ignore[arg-type]
    assert [id(tensor) for tensor in (call.inputs if outer is flat else call.outputs)] == [id(single), id(pair)]
    assert (call.outputs if outer is flat else call.inputs) is flat
    assert not call.blocking


class _Sum:
    """A reduce op as an operator is given it."""

    def op(self) -> int:
        return 0


@pytest.mark.slow
def test_a_collective_that_ends_while_a_slice_does_has_not_failed(two_ranks: RankPool) -> None:
    """torch reports that the wait was too short; by the time that is examined, the collective is complete."""
    assert max(two_ranks.run(runs.waits_in_slices, 500, timeout_sec=60).values()) > 0

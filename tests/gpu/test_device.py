"""Statistics, collectives and models on a GPU are handled as on the CPU, and no step waits for the device.

Two gloo ranks share one GPU; one rank uses NCCL.

Each body runs on the CPU as well, so that what it expects is known to be right before a GPU runs it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ddpstats.dump import StatsDump
from ddpstats.testing import BitFlip, RankPool, run_ranks
from tests.dump.collecting import data, leaves, make_model
from tests.gpu import device_runs as runs

pytestmark = pytest.mark.slow
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def alike(outcomes: list[Any]) -> Any:
    assert outcomes[0] == outcomes[1]
    return outcomes[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mixed", [False, True], ids=["on the device", "one rank on the host"])
def test_stats_on_a_device(two_ranks: RankPool, device: str, dtype: torch.dtype, mixed: bool) -> None:
    expected = {"loss": 1.5, "count": 3.0, "host": 4.0, "largest": 0.5, "only": -1.5}
    for _ in range(2):  # new keys, and known ones
        assert alike(two_ranks.run(runs.reduced, device, dtype, mixed).values()) == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_averages_stay_on_the_device(two_ranks: RankPool, device: str, dtype: torch.dtype) -> None:
    averages, total, where = alike(two_ranks.run(runs.averaged, device, dtype).values())
    assert averages == {"a": (1.75, str(dtype), device), "b": (4.0, "torch.float32", device)}
    assert (total, where) == (8.0, device)


def test_one_copy_from_the_card_and_no_other_wait(gpu: None, two_ranks: RankPool) -> None:
    found, refused, copies = alike(two_ranks.run(runs.without_waiting).values())
    assert found == [float(i) for i in range(8)]
    assert refused  # the mode finds a wait where there is one
    if copies is None:
        pytest.skip("no wait was found; torch's profiler sees nothing of the card here, so copies were not counted")
    assert copies == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_guard_compares_collectives_of_tensors_on_a_device(
    two_ranks: RankPool, device: str, dtype: torch.dtype
) -> None:
    value, seen, error = alike(two_ranks.run(runs.guarded, device, dtype).values())
    assert value == [2.0] * 3
    assert seen == 2
    name = str(dtype).removeprefix("torch.")
    assert f"all_reduce({name}[3], sum)" in error
    assert f"all_reduce({name}[4], sum)" in error


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_capture_under_autocast_with_a_grad_scaler(
    two_ranks: RankPool, device: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    found, is_finite = alike(two_ranks.run(runs.captured, device, dtype, str(tmp_path)).values())
    assert [kind for kind, *_ in found] == ["ok", "scaler_skips", "ok"]
    assert found[1][1] == (1,)
    assert "rank00001.safetensors" in found[1][2]
    assert is_finite  # the scaler left the step out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_sentinel_is_silent_where_nothing_is_wrong(two_ranks: RankPool, device: str, dtype: torch.dtype) -> None:
    assert alike(two_ranks.run(runs.watched, device, dtype, []).values()) == ["", "", ""]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_sentinel_finds_a_flipped_bit(two_ranks: RankPool, device: str, dtype: torch.dtype) -> None:
    flip = BitFlip("last.weight", "weight", 5, bit=3, step=1, rank=1)
    alarms = alike(two_ranks.run(runs.watched, device, dtype, [flip]).values())
    assert alarms[0] == ""
    assert "last.weight" in alarms[-1]


def test_checks_in_one_call_wait_for_the_card_no_more_than_by_their_own(
    two_ranks: RankPool, device: str, tmp_path: Path
) -> None:
    apart = alike(two_ranks.run(runs.judged, device, str(tmp_path), False).values())
    together = alike(two_ranks.run(runs.judged, device, str(tmp_path), True).values())
    assert together == apart
    assert together[0] == [True] * 3
    assert all(waits > 0 for waits in together[1]) == (device == "cuda")


def test_one_rank_with_the_backend_of_the_device(device: str, tmp_path: Path) -> None:
    backend = "nccl" if device == "cuda" else "gloo"
    assert run_ranks(runs.alone, 1, device, backend, str(tmp_path)).values() == [
        {
            "backend": backend,
            "all_reduce": ([1.0, 1.0], 1),
            "stats": {"a": 2.0},
            "decision": True,
            "capture": ["ok", "ok", "ok"],
            "sentinel": ["", "", ""],
        }
    ]


def test_an_asynchronous_dump_does_not_wait_inside_the_step(gpu: None, tmp_path: Path) -> None:
    model = make_model().cuda()
    x = torch.randn(3, 4, device="cuda")
    model(x).square().sum().backward()  # what CUDA sets up the first time may wait
    dump = StatsDump({"dump_path": str(tmp_path), "level": "mix", "async_dump": True}, model=model)
    torch.cuda.set_sync_debug_mode("error")
    try:
        dump.start()
        model(x).square().sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    dump.step()
    assert all(leaf["Max"] is not None for leaf in leaves(data(tmp_path)["Functional.linear.3.forward"]))


@pytest.mark.parametrize("is_async", [False, True])
def test_a_dump_has_the_numbers_of_the_host(device: str, tmp_path: Path, is_async: bool) -> None:
    numbers = []
    for place, path in (("cpu", tmp_path / "host"), (device, tmp_path / "device")):
        model, x = make_model().to(place), torch.ones(3, 4, device=place)
        model.eval()  # generators of devices draw other numbers
        dump = StatsDump({"dump_path": str(path), "level": "mix", "async_dump": is_async}, model=model)
        dump.start()
        model(x).square().sum().backward()
        dump.step()
        stream = torch.cuda.current_stream().stream_id if place == "cuda" else None
        assert {leaf["stream"] for entry in data(path).values() for leaf in leaves(entry)} == {stream}
        numbers.append({name: [leaf["Mean"] for leaf in leaves(entry)] for name, entry in data(path).items()})
    assert numbers[0].keys() == numbers[1].keys()
    assert len(numbers[0]) > 10
    for name, means in numbers[0].items():
        assert numbers[1][name] == pytest.approx(means, rel=1e-3, abs=1e-4)

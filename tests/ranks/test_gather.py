"""`gather_trees` gives every rank the trees of all, of whatever sizes, or the same error."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist

import ddpstats
from ddpstats._ranks.exchange import InvalidLeaf
from ddpstats._ranks.gather import decode, encode, gather_trees
from ddpstats.errors import ProtocolMismatch
from ddpstats.testing import RankPool, count_collectives
from ddpstats.testing.threads import run_threads

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2),
]


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and repr(left) == repr(right)


class Wrapper(torch.Tensor):
    """A tensor whose elements are in another one, as those of a DTensor are."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{func} of a wrapper")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 5), (2, 3, 4)], ids=str)
def test_tensors_survive_the_wire(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.arange(60) % 7).to(dtype)[: torch.Size(shape).numel()].reshape(shape)
    assert same(decode(encode(tensor)), tensor)


@pytest.mark.parametrize(
    "tree",
    [
        None,
        {},
        [],
        (),
        {"a": 1, 2: [True, None, 2.5, "x"], "": {"\ud800": -(1 << 70)}},
        [float("inf"), float("-inf"), float("nan"), -0.0, 5e-324],
        [torch.tensor(1j).conj(), torch.tensor([1j]).conj().imag, torch.ones(2, requires_grad=True) * 2],
        [torch.empty(0, 2**30, 2**30), torch.ones([1] * 64), torch.ones(2, 0, dtype=torch.complex128)],
        [torch.nn.Parameter(torch.ones(2)), [torch.arange(4)[1:]] * 2],
    ],
    ids=lambda tree: str(tree)[:40],
)
def test_trees_survive_the_wire(tree: Any) -> None:
    assert same(decode(encode(tree)), tree)


def test_tensors_have_memory_of_their_own() -> None:
    first, second = decode(encode([torch.zeros(2), torch.zeros(2)]))
    first += 1
    assert second.tolist() == [0, 0]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(120).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.arange(6).reshape(2, 3).t(),
        torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1)[1:],
        torch.arange(24)[::2],
        torch.arange(3).expand(4, 3),
        torch.empty(0, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.arange(6).as_strided((1, 2, 3), (2**62, 1, 2)),
    ],
    ids=["channels last", "transposed", "cut", "every other", "expanded", "empty", "a stride without limit"],
)
def test_tensors_of_any_strides_travel_in_row_major_order(tensor: torch.Tensor) -> None:
    received = decode(encode({"t": tensor, "after": torch.ones(3)}))
    assert same(received, {"t": tensor, "after": torch.ones(3)})
    assert received["t"].stride() == torch.empty(tensor.shape).stride()


@pytest.mark.parametrize(
    ("tree", "path"),
    [
        ({"a": [1, object()]}, "a[1]"),
        ({"a": {1.5: 1}}, "a"),
        ({"a": {True: 1}}, "a"),
        ({"s": torch.ones(2).to_sparse()}, "s"),
        ({"m": torch.ones(2, device="meta")}, "m"),
        ({"w": [Wrapper(torch.ones(2))]}, "w[0]"),
    ],
)
def test_value_that_cannot_be_sent_is_named_by_its_path(tree: Any, path: str) -> None:
    with pytest.raises(InvalidLeaf) as caught:
        encode(tree)
    assert caught.value.failure.path == path


def test_cyclic_and_deep_trees_are_refused() -> None:
    tree: list[Any] = []
    tree.append(tree)
    with pytest.raises(InvalidLeaf, match="deeper"):
        encode(tree)


@pytest.mark.parametrize(
    "tree",
    [
        '["tensor", "none"]',
        '["tensor", "json"]',
        '["tensor", 0]',
        '["tensor", "t", [3]]',
        '["list", [["tensor", "t"], ["tensor", "t"]]]',
        '["complex", "t"]',
        '["list", ["one tensor too many"]]',
        '["dict", ["a", "a"], [1, ["tensor", "t"]]]',
        '["dict", ["a"], [1, ["tensor", "t"]]]',
        '["dict", [1, true], [1, ["tensor", "t"]]]',
        '["dict", [["a"]], [["tensor", "t"]]]',
        '["list", "ab"]',
        '["object", 1]',
        "{}",
        "",
        "[" * 2000,
        '["list", [' * 500 + '["tensor", "t"]' + "]]" * 500,
    ],
)
def test_hostile_trees_are_refused(tree: str) -> None:
    stored = {"t": torch.ones(3), "json": torch.frombuffer(bytearray(tree.encode() or b" "), dtype=torch.uint8)}
    with pytest.raises(ProtocolMismatch):
        decode(safetensors.torch.save(stored))


@pytest.mark.parametrize(
    ("dtype", "shape", "data_offsets"),
    [
        ("F32", "[4611686018427387904, 4]", "[0, 16]"),
        ("F32", "[0, 4611686018427387904, 4611686018427387904]", "[0, 0]"),
        ("F32", "[18446744073709551615, 0]", "[0, 0]"),
        ("F32", "[-4]", "[0, 16]"),
        ("F32", "[5]", "[0, 20]"),
        ("F32", "[3]", "[0, 16]"),
        ("F32", "[4]", "[-4, 12]"),
        ("F8_E8M0", "[16]", "[0, 16]"),
        ("Storage", "[4]", "[0, 16]"),
    ],
)
def test_hostile_headers_are_refused(dtype: str, shape: str, data_offsets: str) -> None:
    tree = '["tensor", "t"]'
    text = {"dtype": "U8", "shape": [len(tree)], "data_offsets": [16, 16 + len(tree)]}
    tensor = f'{{"dtype": "{dtype}", "shape": {shape}, "data_offsets": {data_offsets}}}'
    header = f'{{"t": {tensor}, "json": {json.dumps(text)}}}'.encode()
    with pytest.raises(ProtocolMismatch):
        decode(struct.pack("<Q", len(header)) + header + bytes(16) + tree.encode())


def test_damaged_bytes_are_refused() -> None:
    whole = bytes(encode({"a": torch.arange(5), "b": [1.5, (None, torch.ones(2, 2))]}))
    assert same(decode(whole), decode(bytearray(whole)))
    for length in range(len(whole)):
        with pytest.raises(ProtocolMismatch):
            decode(whole[:length])
    for damaged in (whole + b"\0", b"\xff" * 8 + whole[8:], bytes(8) + whole[8:]):
        with pytest.raises(ProtocolMismatch):
            decode(damaged)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_tensors_come_to_the_cpu_whatever_the_default_device_is(device: str) -> None:
    payload = encode([torch.ones(2), torch.empty(0, 3)])
    with torch.device(device):
        full, empty = decode(payload)
    assert full.tolist() == [1, 1]
    assert (empty.device.type, tuple(empty.shape)) == ("cpu", (0, 3))


# -- on threads and real ranks ----------------------------------------------------------------------------------------


SIZES = (1, 2, 1000, 5000, 3, 3, 0, 9000, 9000)


def growing_and_shrinking() -> list[tuple[int, list[int]]]:
    """Return for each call its collectives, and the number of elements that came from each rank."""
    rank, seen = dist.get_rank(), []
    gather_trees(None, name="the first use")
    for size in SIZES:
        with count_collectives() as counted:
            trees = gather_trees([torch.arange(size * rank)], name="sizes")
        assert all(torch.equal(tree[0], torch.arange(size * r)) for r, tree in enumerate(trees))
        seen.append((counted.total, [tree[0].numel() for tree in trees]))
    return seen


def handed_out(owner: int, size: int) -> int:
    """Return how many bytes this rank receives where one rank alone has something large."""
    tree = torch.zeros(size, dtype=torch.uint8) if dist.get_rank() == owner else None
    with count_collectives() as seen:
        trees = gather_trees(tree, name="handed out")
    assert trees[owner].numel() == size
    received = {"allgather": dist.get_world_size(), "broadcast": 1}
    return sum(seen.bytes_by_op[op] * times for op, times in received.items())


def errors_then_success() -> list[str]:
    """Return what each call raised. The last one works."""
    rank, endings = dist.get_rank(), []

    def attempt(call: Any) -> None:
        try:
            call()
            endings.append("fine")
        except ddpstats.DdpstatsError as error:
            endings.append(f"{type(error).__name__} {error.ranks} {error.path}: {error}")

    attempt(lambda: gather_trees({"a": [1, object() if rank == 1 else 2]}, name="x"))
    attempt(lambda: gather_trees(lambda: 1 / rank, name="x"))
    attempt(lambda: gather_trees(1, name="x" if rank == 0 else "y"))
    attempt(lambda: gather_trees(1, name="x") if rank == 0 else ddpstats.reduce_stats({"a": 1.0}))
    attempt(lambda: gather_trees({"rank": rank}, name="x"))
    return endings


def test_thirty_threads_hold_different_trees() -> None:
    def body(group: Any) -> list[Any]:
        rank = group.rank
        tree = {f"only{rank}": torch.full((rank,), rank), "all": [rank] * (rank % 3)}
        return [gather_trees(tree, name="x", group=group) for _ in range(2)][1]

    by_rank = run_threads(body, 30).values()
    for gathered in by_rank:
        assert [list(tree) for tree in gathered] == [[f"only{rank}", "all"] for rank in range(30)]
        assert all(same(a, b) for a, b in zip(gathered, by_rank[0], strict=True))


def test_gather_takes_three_collectives_whatever_the_sizes(two_ranks: RankPool) -> None:
    for seen in two_ranks.run(growing_and_shrinking).values():
        assert seen == [(2 if size == 0 else 3, [0, size]) for size in SIZES]  # 2: all ranks hold the same


@pytest.mark.parametrize("pool", ["two_ranks", pytest.param("four_ranks", marks=pytest.mark.slow)])
def test_what_one_rank_hands_out_is_received_once(request: pytest.FixtureRequest, pool: str) -> None:
    ranks: RankPool = request.getfixturevalue(pool)
    for received_bytes in ranks.run(handed_out, 1, 8 << 20).values():
        assert 8 << 20 <= received_bytes < 9 << 20


def test_gathers_of_many_names_leave_little_behind() -> None:
    def body(group: Any) -> int:
        for number in range(1100):
            gather_trees(number, name=f"name {number}", group=group)
        agreement = group.channel._agreement
        return len(agreement.sites) + len(agreement._nothing.seals)

    assert all(kept <= 1024 for kept in run_threads(body, 2).values())


def test_every_rank_gets_the_same_error_and_goes_on(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(errors_then_success).values()
    assert first == second
    unsendable, unmade, names, reduction, fine = first
    assert unsendable.startswith("InvalidStats (1,) a[1]: ")
    assert "type object" in unsendable
    assert unmade.startswith(
        "InvalidStats (0,) None: x: values that cannot be gathered:\n  rank 0: ZeroDivisionError: "
    )
    assert names.startswith("ProtocolMismatch (0, 1) None: ")
    assert "rank 0: x" in names
    assert "rank 1: y" in names
    assert "rank 1: reduce_stats" in reduction
    assert fine == "fine"

"""A batch that is stored comes back as it was; what cannot be stored, or was not stored by us, is refused by name."""

from __future__ import annotations

import collections
import dataclasses
import io
import math
import types
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from ddpstats._ranks.device import bytes_in
from ddpstats._ranks.gather import COMPLEX, DTYPE_NAMES
from ddpstats._rerun import codec
from ddpstats._rerun.codec import CannotStore, from_plain, to_plain
from ddpstats._rerun.record import PackedStep, Packet
from ddpstats._rerun.state import Autocast
from ddpstats.capture.bundle import ModelPart
from ddpstats.errors import BundleError
from tests.capture.making import stored_and_read
from tests.capture.replay_models import Pair
from tests.training import Foreign


@dataclasses.dataclass
class Sample:
    x: torch.Tensor
    names: list[str]


class Frozen(Mapping[str, Any]):
    def __getitem__(self, key: str) -> Any:
        return {"a": 1}[key]

    def __iter__(self) -> Iterator[str]:
        return iter(["a"])

    def __len__(self) -> int:
        return 1


def through_a_file(value: Any) -> Any:
    return from_plain(stored_and_read([to_plain(value)], list)[0])


def keys() -> st.SearchStrategy[Any]:
    simple = st.one_of(st.text(max_size=5), st.integers(), st.booleans(), st.none(), st.binary(max_size=3))
    return st.one_of(simple, st.tuples(simple, simple))


def leaves() -> st.SearchStrategy[Any]:
    numbers = st.one_of(st.integers(), st.floats(), st.complex_numbers(), st.booleans())
    return st.one_of(st.none(), numbers, st.text(max_size=8), st.binary(max_size=8), st.just("\ud800"))


def trees() -> st.SearchStrategy[Any]:
    def grown(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        lists = st.lists(inner, max_size=3)
        tags = st.sampled_from(["kind", "items", "data", "name", "fields"])
        dicts = st.one_of(st.dictionaries(keys(), inner, max_size=3), st.dictionaries(tags, inner, max_size=4))
        return st.one_of(lists, lists.map(tuple), dicts)

    return st.recursive(leaves(), grown, max_leaves=12)


@settings(max_examples=80)
@given(trees())
def test_containers_and_numbers_come_back(tree: Any) -> None:
    back = through_a_file(tree)
    assert repr(back) == repr(tree)  # NaN is not equal to itself


def test_a_parameter_in_complex128_comes_back() -> None:
    tensor = torch.randn(2, 3, dtype=torch.complex128)
    for whole in (tensor, tensor.t(), tensor[0, 0], tensor.conj()):
        assert torch.equal(stored_and_read(ModelPart({"w": whole}), ModelPart).parameters["w"], whole)


def test_of_a_view_only_its_elements_are_stored() -> None:
    whole = torch.arange(1000.0, requires_grad=True)
    plain = to_plain(whole[10:12])
    assert plain["data"].untyped_storage().nbytes() == 8
    assert (plain["requires_grad"], plain["accelerator"]) == (True, False)
    assert not plain["data"].requires_grad
    back = from_plain(plain)
    assert back.requires_grad
    assert back.is_leaf
    assert to_plain(torch.ones(1).expand(100))["data"].untyped_storage().nbytes() == 400
    assert to_plain(torch.ones(4, 4)[:, ::2])["data"].untyped_storage().nbytes() == 32


def test_a_stored_batch_is_a_copy() -> None:
    tensor = torch.zeros(2)
    plain = to_plain({"x": tensor})
    tensor += 1
    first = from_plain(plain)["x"]
    first += 1
    assert from_plain(plain)["x"].tolist() == [0, 0]


def test_types_of_the_users_come_back_as_their_like() -> None:
    pair = through_a_file(Pair(torch.ones(1), 3))
    assert (type(pair).__name__, pair._fields, pair.y) == ("Pair", ("x", "y"), 3)
    sample = through_a_file(Sample(torch.ones(2), ["a"]))
    assert isinstance(sample, types.SimpleNamespace)
    assert sample.names == ["a"]
    assert through_a_file(collections.UserDict(a=1)) == {"a": 1}
    assert through_a_file(collections.OrderedDict(b=2)) == {"b": 2}
    assert through_a_file(Frozen()) == {"a": 1}
    assert through_a_file(torch.Size([2, 3])) == (2, 3)
    assert through_a_file(bytearray(b"ab")) == b"ab"
    renamed = collections.namedtuple("renamed", ["a", "class"], rename=True)
    assert through_a_file(renamed(1, 2))._1 == 2


def test_a_packed_sequence_can_be_used_again() -> None:
    packed = pack_padded_sequence(torch.randn(2, 3, 4), torch.tensor([3, 2]), batch_first=True)
    back = through_a_file(packed)
    assert isinstance(back, PackedSequence)
    assert torch.equal(back.data, packed.data)


@pytest.mark.parametrize(
    "array",
    [
        numpy.arange(6, dtype="int16").reshape(2, 3),
        numpy.array([math.nan, 1.0]),
        numpy.array(["ab", "c"]),
        numpy.array(["", ""]),
        numpy.array(["2020-01-01"], dtype="datetime64[D]"),
        numpy.zeros((0, 2), dtype="float32"),
        numpy.arange(4, dtype=">i4")[::2],
        numpy.array([1 + 2j]),
    ],
    ids=lambda array: str(array.dtype),
)
def test_array_of_numpy_comes_back_as_it_was(array: Any) -> None:
    back = through_a_file(array)
    assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, array.shape, array.tobytes())
    back[...] = back  # it can be written to


@pytest.mark.parametrize(
    "scalar",
    [numpy.float32(1.5), numpy.int64(3), numpy.bool_(True), numpy.str_("ab"), numpy.str_("")],
    ids=repr,
)
def test_scalar_of_numpy_comes_back_with_its_type(scalar: Any) -> None:
    back = through_a_file(scalar)
    assert type(back) is type(scalar)
    assert back == scalar


@pytest.mark.parametrize(
    ("batch", "path", "message"),
    [
        ({"x": [object()]}, "batch['x'][0]", "of type object"),
        ((1, {2}), "batch[1]", "of type set"),
        (Pair(torch.ones(1), lambda: 0), "batch.y", "of type function"),  # type: ignore[arg-type]
        (Sample(torch.ones(1), [b"", range(2)]), "batch.names[1]", "of type range"),  # type: ignore[list-item]
        ({"s": torch.eye(2).to_sparse()}, "batch['s']", "torch.sparse_coo"),
        ({"c": torch.ones(1).to(torch.float8_e4m3fnuz)}, "batch['c']", "torch.float8_e4m3fnuz"),
        ({"m": torch.ones(1, device="meta")}, "batch['m']", "meta"),
        (numpy.array([object()]), "batch", "dtype object"),
        ({frozenset(): 1}, "the key frozenset() of batch", "of type frozenset"),
        (int, "batch", "of type type"),
    ],
)
def test_what_cannot_be_stored_is_named(batch: Any, path: str, message: str) -> None:
    with pytest.raises(CannotStore) as caught:
        to_plain(batch)
    assert str(caught.value).startswith(f"{path} is ")
    assert message in str(caught.value)
    assert "or leave the batch out" in str(caught.value)
    assert caught.value.path == path


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_quantized_tensor_is_named() -> None:
    quantized = torch.quantize_per_tensor(torch.ones(1), 0.1, 0, torch.qint8)
    with pytest.raises(CannotStore, match=r"batch\['x'\]\[0\] is of type torch.Tensor \(torch.strided, torch.qint8"):
        to_plain({"x": [quantized]})


def test_a_tensor_that_occurs_twice_is_copied_and_stored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = list[torch.Tensor]()

    def copy_of(value: torch.Tensor) -> torch.Tensor:
        copied.append(value)
        return value.clone()

    monkeypatch.setattr(codec, "_host_copy", copy_of)
    tensor = torch.arange(1000.0)
    file = io.BytesIO()
    codec.write(file, [to_plain([tensor, tensor])])
    assert len(copied) == 1
    assert len(file.getvalue()) < 6000
    first, second = through_a_file([tensor, tensor])
    assert first is second
    assert first.tolist() == tensor.tolist()


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 1, 4, 5)])
def test_strides_of_channels_last_come_back(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).to(memory_format=torch.channels_last)
    back = through_a_file(tensor)
    assert torch.equal(back, tensor)
    assert back.stride() == tensor.stride()


STEP: Any = PackedStep(
    (Packet(to_plain({"x": torch.ones(2, 3).t()}), {"python": [1]}, Autocast("cpu", True, torch.bfloat16), None),),
    {"mean": torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)},
    2.0,
    {"threads": 2, "default_dtype": "torch.float32"},
)


@pytest.mark.parametrize("dtype", [*DTYPE_NAMES, *COMPLEX], ids=str)
@pytest.mark.parametrize("shape", [(), (3, 2), (0, 2)])
def test_every_dtype_comes_back_from_a_file_and_from_memory(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(math.prod(shape)).view(shape).to(dtype)
    for back in (stored_and_read([tensor], list), codec.from_bytes(codec.to_bytes([tensor]), list, "it")):
        assert (back[0].dtype, back[0].shape) == (dtype, tensor.shape)
        assert bytes(bytes_in(back[0])) == bytes(bytes_in(tensor))


def test_a_step_comes_back_from_memory_with_its_strides() -> None:
    step = codec.from_bytes(codec.to_bytes(STEP), PackedStep, "it")
    assert (step.scale, step.switches) == (STEP.scale, STEP.switches)
    assert step.micro_batches[0].autocast == ("cpu", True, torch.bfloat16)
    assert from_plain(step.micro_batches[0].batch)["x"].stride() == (1, 3)
    assert step.buffers["mean"].stride() == STEP.buffers["mean"].stride()


@pytest.mark.parametrize("step", [[], {}, replace(STEP, scale="x"), replace(STEP, buffers={"mean": 3})], ids=range(4))
def test_what_is_no_step_is_refused(step: Any) -> None:
    with pytest.raises(BundleError, match="the step of rank 3 is refused: ValidationError: "):
        codec.from_bytes(codec.to_bytes(step), PackedStep, "the step of rank 3")


def test_bytes_that_are_cut_or_of_another_kind_are_refused() -> None:
    whole = codec.to_bytes(STEP)
    for data in (whole[:0], whole[:7], whole[:100], whole[:-1], whole.to(torch.int16), whole.view(1, -1), whole * 0):
        with pytest.raises(BundleError, match="the step is refused: "):
            codec.from_bytes(data, PackedStep, "the step")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.eye(2).to_sparse(),
        torch.ones(1, device="meta"),
        torch.ones(1).to(torch.float8_e4m3fnuz),
        Foreign(torch.ones(1)),
        torch._efficientzerotensor((2,)),
    ],
    ids=["sparse", "meta", "dtype", "foreign", "zeros"],
)
def test_a_tensor_that_cannot_be_written_is_an_error_that_names_it_and_its_type(tensor: torch.Tensor) -> None:
    with pytest.raises(TypeError, match=r"^buffers\['mean'\] is of type .*, which cannot be stored as plain data"):
        codec.to_bytes(replace(STEP, buffers={"mean": tensor}))


def test_what_would_be_refused_when_it_is_read_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "_MAX_JSON_BYTES", 1 << 20)
    step = replace(STEP, micro_batches=(replace(STEP.micro_batches[0], batch="x" * (1 << 20)),))
    with pytest.raises(ValueError, match="beside tensors it has 1,048,"):
        codec.to_bytes(step)


def test_complex_numbers_need_no_name_that_old_safetensors_lack() -> None:
    data = bytes(codec.to_bytes([torch.ones(2, dtype=torch.complex64)]).tolist())
    assert b"C64" not in data


def test_tensors_of_a_device_are_on_the_host_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[weakref.ref[torch.Tensor]] = []
    counts = []

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        counts.append(sum(copy() is not None for copy in copies))
        copy = tensor.clone()
        copies.append(weakref.ref(copy))
        return copy

    tensors = [torch.full((3,), float(index)) for index in range(5)]
    monkeypatch.setattr(torch.Tensor, "cpu", copied)
    back = stored_and_read(tensors, list)
    monkeypatch.undo()
    assert counts == [0] * 6  # the JSON, too
    assert [tensor.tolist() for tensor in back] == [[index] * 3 for index in range(5)]


@pytest.mark.parametrize(
    "tensor", [torch.ones(1).expand(4), torch.arange(6.0).view(2, 3).t()[1:], torch.zeros(0, 3), torch.tensor(7)]
)
def test_views_and_expanded_tensors_are_written_as_what_they_show(tensor: torch.Tensor) -> None:
    shared = torch.arange(4.0)
    back = stored_and_read([tensor, shared, shared[1:]], list)
    assert (back[0].shape, back[0].tolist()) == (tensor.shape, tensor.tolist())
    assert [value.tolist() for value in back[1:]] == [[0, 1, 2, 3], [1, 2, 3]]


def deep(levels: int) -> Any:
    plain: Any = []
    for _ in range(levels):
        plain = [plain]
    return plain


@pytest.mark.parametrize(
    "plain",
    [
        object(),
        (1, 2),
        {"kind": "evil"},
        {"kind": "tensor", "data": 3, "accelerator": False, "requires_grad": False},
        {"kind": "tensor", "data": torch.ones(1, dtype=torch.int64), "accelerator": False, "requires_grad": True},
        {"kind": "tuple", "items": 3},
        {"kind": "dict", "items": [[[], 1]]},
        {"kind": "bytes", "data": torch.ones(3)},
        {"kind": "float", "text": "x"},
        {"kind": "packed", "name": "a", "fields": ["x"], "items": [1]},
        {"kind": "array", "data": torch.ones(8, dtype=torch.uint8), "dtype": "<f8", "shape": [2]},
        {"kind": "namedtuple", "name": "a", "fields": ["__import__('os')"], "items": [1]},
        {"kind": "object", "name": "a", "fields": ["x"], "items": []},
        deep(200),
    ],
    ids=range(14),
)
def test_what_no_capture_writes_is_refused(plain: Any) -> None:
    with pytest.raises(BundleError):
        from_plain(plain)

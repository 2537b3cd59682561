"""Digests of equal bits are equal wherever these are stored, and a flipped bit always changes the digest."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from ddpstats._rerun import digest as rules
from ddpstats._rerun.digest import digests

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


def digest(tensor: Tensor) -> int:
    return int(digests([tensor]))


def bits_of(*size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Any bits; of bool only 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    element_bytes = torch.empty(0, dtype=dtype).element_size()
    top = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, top, (*size[:-1], size[-1] * element_bytes), dtype=torch.uint8, generator=generator)
    return raw.view(dtype)


def flips_of(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor with each single one of its bits flipped."""
    raw = tensor.contiguous().view(torch.uint8)
    for index, bit in itertools.product(range(raw.numel()), range(8)):
        flipped = raw.clone()
        flipped.view(-1)[index] ^= 1 << bit
        yield flipped.view(tensor.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_flipped_bit_of_a_small_tensor_changes_the_digest(dtype: torch.dtype) -> None:
    for count in (1, 2, 3, 7, 9):
        tensor = bits_of(count, dtype=dtype)
        seen = {digest(flipped) for flipped in flips_of(tensor)} | {digest(tensor)}
        assert len(seen) == 1 + 8 * tensor.numel() * tensor.element_size()  # and no two flips have one digest


@settings(max_examples=60)
@given(words=st.integers(1, 200_000), index=st.integers(0), bit=st.integers(0, 63), seed=st.integers(0, 9))
def test_a_flipped_bit_of_a_large_tensor_changes_the_digest(words: int, index: int, bit: int, seed: int) -> None:
    tensor = bits_of(words, dtype=torch.int64, seed=seed)
    before = digest(tensor)
    tensor[index % words] ^= -(2**63) if bit == 63 else 1 << bit
    assert digest(tensor) != before


@settings(max_examples=60)
@given(content=st.binary(min_size=1, max_size=64), second_content=st.binary(min_size=1, max_size=64))
def test_other_bytes_of_one_length_have_another_digest(content: bytes, second_content: bytes) -> None:
    second_content = second_content.ljust(len(content), b"\0")[: len(content)]
    first, second = (torch.tensor(list(data), dtype=torch.uint8) for data in (content, second_content))
    assert (digest(first) == digest(second)) == (content == second_content)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [2, 8, pytest.param(70_000, marks=pytest.mark.slow)])
def test_the_same_change_of_every_element_changes_the_digest(dtype: torch.dtype, count: int) -> None:
    """Software changes all elements in the same way, and equal changes must not cancel each other."""
    tensor = torch.randn(count, generator=torch.Generator().manual_seed(1)).to(dtype)
    changed = [-tensor, tensor * 2, tensor / 2, tensor.abs(), torch.zeros_like(tensor), tensor.flip(0), tensor.roll(1)]
    width = 8 * tensor.element_size()
    integer = {64: torch.int64, 32: torch.int32, 16: torch.int16}[width]
    masks = [-(1 << bit) if bit == width - 1 else 1 << bit for bit in range(width)]
    flipped = [(tensor.view(integer) ^ mask).view(dtype) for mask in masks]
    others = [wrong for wrong in [*changed, *flipped] if not torch.equal(wrong.view(integer), tensor.view(integer))]
    assert len(others) >= width + 4
    assert digest(tensor) not in {digest(wrong) for wrong in others}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 5, 8, pytest.param(300_001, marks=pytest.mark.slow)])
def test_where_a_tensor_lies_in_memory_does_not_matter(dtype: torch.dtype, count: int) -> None:
    tensor = bits_of(count, dtype=dtype)
    for offset in (1, 2, 3):
        room = bits_of(count + offset, dtype=dtype, seed=7)
        room[offset:] = tensor
        assert digest(room[offset:]) == digest(tensor)


def test_strides_do_not_matter() -> None:
    image = torch.randn(4, 3, 5, 6)
    expected = digest(image)
    assert digest(image.contiguous(memory_format=torch.channels_last)) == expected
    assert digest(image.transpose(0, 2).contiguous().transpose(0, 2)) == expected
    assert digest(torch.stack([image, image + 1], -1)[..., 0]) == expected
    assert digest(image[:1, :1, 2:3, 3]) == digest(image[0, 0, 2, 3].clone())  # one element, of any stride
    assert digest(torch.ones(1).expand(9)) == digest(torch.ones(9))


def test_conjugated_and_negated_views_count_as_what_they_show() -> None:
    tensor = torch.randn(5, dtype=torch.complex64)
    assert digest(tensor.conj()) == digest(tensor.conj().resolve_conj()) != digest(tensor)
    assert digest(tensor.conj().imag) == digest(tensor.conj().resolve_conj().imag)


def test_no_tensor_no_element_and_no_dimension() -> None:
    assert digests([]).shape == (0,)
    assert digests([torch.empty(0), torch.empty(3, 0, dtype=torch.bool)]).tolist() == [0, 0]
    assert digest(torch.tensor(2.5)) == digest(torch.tensor([2.5]))


def test_equal_bits_of_nan_are_equal_and_zeros_of_other_sign_are_not() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert digest(nan) == digest(nan.clone())
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))


def test_a_digest_is_what_the_definition_says() -> None:
    """Compute one by hand, in Python's integers; ranks of other versions or devices must agree."""
    tensor = bits_of(2 * rules._CHUNK_WORDS + 5, dtype=torch.int64)
    multipliers = [number % 2**64 for number in rules._odd_numbers(0, rules._CHUNK_WORDS).tolist()]
    of_chunks = [1, *(number % 2**64 for number in rules._odd_numbers((1 << 40) + 1, 2).tolist())]
    total = 0
    for index, signed in enumerate(tensor.tolist()):
        word = signed % 2**64
        chunk, within = divmod(index, rules._CHUNK_WORDS)
        total += (word ^ word >> 33) * multipliers[within] * of_chunks[chunk]
    assert digest(tensor) % 2**64 == total % 2**64
    assert all(number % 2 for number in multipliers)
    assert len(set(multipliers)) == len(multipliers)


def test_the_way_of_accelerators_gives_the_same_digest() -> None:
    for count in (1, 5, rules._CHUNK_WORDS, 3 * rules._CHUNK_WORDS + 7):
        flat = bits_of(count, dtype=torch.int64)
        one_chunk_at_once, many = (torch.cat([part.view(-1) for part in rules._sums(flat, n)]) for n in (1, 256))
        assert torch.equal(one_chunk_at_once, many)
    assert list(rules._sums(torch.empty(0), 256)) == []


def test_splitmix64_is_splitmix64() -> None:
    """Against the published sequence for the seed 0; only the lowest bit is set besides."""
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [number % 2**64 for number in rules._odd_numbers(0, 3).tolist()] == [number | 1 for number in published]

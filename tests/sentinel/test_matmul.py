"""The matmul checksum finds wrong products, reports no right one, and leaves a program's results as they are."""

from __future__ import annotations

import gc
import os
import signal
import textwrap
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpstats import ConfigError
from ddpstats.sentinel import matmul as door
from ddpstats.sentinel.matmul import ChecksumWindow, Product
from ddpstats.testing import BitFlip, inject_bit_flips
from tests import training
from tests.capabilities import flips_products, takes_kernels_away
from tests.programs import run
from tests.sentinel import sentinel_runs
from tests.sentinel.products import DTYPES, faults_in_all_rows, faults_of, flip, numbers, product_of

INF, NAN = float("inf"), float("nan")
# -- the checks, as functions of tensors ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 5, 6), (64, 256, 64), (33, 1, 9), (5, 300, 1), (1, 40, 40)])
def test_clean_products_have_no_faults(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    left, right = numbers(m, k).to(dtype), numbers(k, n, seed=50).to(dtype)
    assert faults_of(product_of(left, right)) == []
    assert faults_of(product_of(left.abs(), right.abs())) == []
    assert faults_of(product_of(left.expand(2, m, k), right.expand(2, k, n))) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_large_enough_change_of_any_element_is_found_where_it_is(dtype: torch.dtype) -> None:
    left, right = numbers(6, 16).to(dtype), numbers(16, 8, seed=1).to(dtype)
    for element in range(48):
        product = product_of(left, right)
        flat = product.result.view(-1)
        right_value = flat[element].item()
        flat[element] += 4.0
        (fault,) = faults_of(product)
        assert fault.index == divmod(element, 8)
        assert (fault.op, fault.shape, fault.wrong) == ("mm", (6, 16, 8), 1)
        assert fault.dtype == str(dtype).removeprefix("torch.")
        assert fault.got == flat[element].item()
        assert fault.expected == pytest.approx(right_value, rel=0.01, abs=0.01)
        assert fault.transient


def test_in_float32_bits_from_the_upper_mantissa_on_are_found() -> None:
    left, right = numbers(64, 64), numbers(64, 64, seed=1)
    typical = (left @ right)[9].abs().argmax().item()
    for bit in range(14, 32):
        product = product_of(left, right)
        flip(product.result, 9 * 64 + int(typical), bit)
        assert len(faults_of(product)) == 1, bit


def test_a_fault_that_the_kernel_repeats_is_sticky() -> None:
    product = product_of(numbers(4, 8), numbers(8, 4, seed=1))
    product.result[1, 2] = 100.0
    (fault,) = faults_of(product._replace(again=lambda: product.result.clone()))
    assert not fault.transient
    assert fault.got == 100.0


def test_a_fault_below_the_worst_case_of_rounding_is_found_because_it_is_not_repeated() -> None:
    left, right = numbers(4, 4096).abs(), numbers(4096, 4, seed=1).abs()
    product = product_of(left, right)
    product.result[1, 2] *= 1 + 1e-4  # any order of summation may be off by 2.4e-4
    assert [fault.index for fault in faults_of(product)] == [(1, 2)]
    assert faults_of(product._replace(again=lambda: product.result.clone())) == []


def test_several_wrong_elements_of_a_row_are_one_fault() -> None:
    product = product_of(numbers(3, 4, 8), numbers(3, 8, 6, seed=1))
    product.result[2, 1, 3:] += 50.0
    product.result[0, 0, 0] = NAN
    first, second = faults_of(product)
    assert (first.index, first.wrong) == ((0, 0, 0), 1)
    assert (second.index, second.wrong, second.op) == ((2, 1, 3), 3, "bmm")


def test_a_nan_or_infinity_from_finite_operands_is_a_fault() -> None:
    for value in (NAN, INF, -INF):
        product = product_of(numbers(4, 8), numbers(8, 4, seed=1))
        product.result[3, 3] = value
        (fault,) = faults_of(product)
        assert fault.index == (3, 3)


def test_operands_that_are_not_finite_are_no_fault_and_hide_none() -> None:
    left, right = numbers(4, 8), numbers(8, 6, seed=1)
    left[0, 0], left[1, 1], right[3, 2] = INF, NAN, -INF
    product = product_of(left, right)
    assert faults_of(product) == []
    product.result[3, 5] += 10.0
    assert [fault.index for fault in faults_of(product)] == [(3, 5)]


def test_an_overflow_is_no_fault() -> None:
    for dtype, value in ((torch.float32, 1e30), (torch.float16, 6e4), (torch.bfloat16, 1e30)):
        left = torch.full((4, 8), value).to(dtype)
        product = product_of(left, left.t())
        assert bool(product.result.isinf().all())
        assert faults_of(product) == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-4, 1e-20, 1e-30, 1e-40, 1e4, 1e15])
def test_huge_and_tiny_operands_are_no_fault(dtype: torch.dtype, scale: float) -> None:
    left, right = (numbers(16, 64).double() * scale).to(dtype), (numbers(64, 16, seed=1).double() * scale).to(dtype)
    assert faults_of(product_of(left, right)) == []
    assert faults_of(product_of(left, numbers(64, 16, seed=1).to(dtype))) == []


def test_an_element_that_becomes_huge_among_tiny_ones_is_found() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for scale in (1e-20, 1.0, 1e10):
            product = product_of((numbers(16, 64) * scale).to(dtype), numbers(64, 16, seed=1).to(dtype))
            for value in (3e38, 1e25, 1e19):
                product.result[5, 5] = value
                assert [fault.index for fault in faults_of(product)] == [(5, 5)], (dtype, scale, value)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_cancel_are_no_fault(dtype: torch.dtype) -> None:
    left = numbers(32, 64).double()
    left = (left - left.mean(-1, keepdim=True)).to(dtype)
    right = (numbers(64, 48, seed=1) * 1e-3 + 3).to(dtype)
    assert faults_of(product_of(left, right)) == []
    assert faults_of(product_of(torch.zeros_like(left), right)) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_elements_whose_rounding_adds_up_are_no_fault(dtype: torch.dtype) -> None:
    for k in (16, 4096):
        product = product_of(torch.full((4, k), 0.1).to(dtype), torch.full((k, 64), 0.3).to(dtype))
        assert faults_of(product) == []
        assert faults_in_all_rows(product) == []


def test_empty_products_are_no_fault() -> None:
    for m, k, n in ((0, 3, 4), (3, 0, 4), (3, 4, 0)):
        assert faults_of(product_of(torch.ones(m, k), torch.ones(k, n))) == []
        assert faults_of(product_of(torch.ones(2, m, k), torch.ones(2, k, n))) == []


def test_products_in_less_than_float32_are_no_fault_where_the_user_allows_them() -> None:
    left, right = numbers(64, 64), numbers(64, 64, seed=1)
    rough = (left.bfloat16().float() @ right.bfloat16().float()).clone()
    product = Product("mm", rough, left, right, None, 1.0, 1.0, lambda: rough)
    assert faults_of(product) != []
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert faults_of(product) == []
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_factors_rounded_to_half_precision_are_no_fault(dtype: torch.dtype) -> None:
    left, right, addend = numbers(8, 2).to(dtype), numbers(2, 8, seed=1).to(dtype), numbers(8, 8, seed=2).to(dtype)
    for alpha, beta in ((1.0, 0.001), (0.001, 1.0), (0.001, 0.001)):
        rounded = [torch.tensor(factor, dtype=dtype) for factor in (alpha, beta)]
        result = rounded[0] * (left @ right) + rounded[1] * addend
        product = Product("addmm", result, left, right, addend, beta, alpha, result.clone)
        assert faults_in_all_rows(product) == []


def test_subnormal_terms_times_alpha_are_no_fault() -> None:
    tiny = torch.finfo(torch.float32).tiny
    left, right = torch.full((4, 8), 0.3 * tiny), torch.full((8, 4), 0.9)
    flushed = torch.zeros(4, 4)
    assert faults_in_all_rows(Product("mm", flushed, left, right, None, 1.0, 1000.0, flushed.clone)) == []
    assert faults_in_all_rows(Product("mm", flushed, left, right, None, 1.0, 1e20, flushed.clone)) == []


# -- the window -------------------------------------------------------------------------------------------------------


def both_layouts(left: Tensor, right: Tensor) -> list[tuple[Tensor, Tensor]]:
    turned = right.transpose(-1, -2).contiguous().transpose(-1, -2)
    spread = torch.zeros(*left.shape[:-1], 2 * left.shape[-1], dtype=left.dtype)
    spread[..., ::2] = left
    return [(left, right), (left, turned), (spread[..., ::2], right)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_way_to_multiply_matrices_is_checked_and_clean(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    three = numbers(2, 4, 5).to(dtype), numbers(2, 5, 3, seed=1).to(dtype)
    bias, matrix = numbers(3, seed=2).to(dtype), numbers(4, 3, seed=3).to(dtype)
    column, scalar = matrix[:, :1], torch.tensor(2.0, dtype=dtype)
    weight = three[1][0].t().contiguous()
    ways: list[tuple[str, Callable[[Tensor, Tensor], Any]]] = [
        ("mm", lambda a, b: a[0] @ b[0]),
        ("mm", lambda a, b: torch.mm(a[0], b[0], out=torch.empty(4, 3, dtype=dtype))),
        ("bmm", lambda a, b: a @ b),
        ("bmm", lambda a, b: torch.bmm(a, b, out=torch.empty(2, 4, 3, dtype=dtype))),
        ("bmm", lambda a, b: torch.einsum("bij,bjk->bik", a, b)),
        ("addmm", lambda a, b: F.linear(a[0], weight, bias)),
        ("addmm", lambda a, b: F.linear(a.contiguous(), weight, bias)),
        ("mm", lambda a, b: F.linear(a.contiguous(), weight)),
        *(
            ("addmm", lambda a, b, c=c: torch.addmm(c, a[0], b[0], beta=0.5, alpha=-3))
            for c in (bias, matrix, column, scalar)
        ),
        ("addmm", lambda a, b: torch.addmm(matrix, a[0], b[0], out=torch.empty(4, 3, dtype=dtype))),
        ("addmm", lambda a, b: torch.addmm(torch.full((3,), NAN, dtype=dtype), a[0], b[0], beta=0)),
        ("baddbmm", lambda a, b: torch.baddbmm(matrix, a, b, beta=2, alpha=0.5)),
        ("baddbmm", lambda a, b: torch.baddbmm(torch.full((1, 1, 3), -INF, dtype=dtype), a, b)),
    ]
    for op, way in ways:
        for left, right in both_layouts(*three):
            seen: list[Product] = []
            with ChecksumWindow(), monkeypatch.context() as patch:
                patch.setattr(door, "_check", seen.append)
                result = way(left, right)
            assert [product.op for product in seen] == [op]
            with ChecksumWindow() as window:
                again = way(left, right)
            assert torch.equal(result.nan_to_num(), again.nan_to_num())
            assert (window.checked, window.faults, window.problem) == (1, [], None)
            with torch.inference_mode(), ChecksumWindow() as window:
                way(left, right)
            assert window.checked == 1


def test_a_wrong_addend_or_factor_is_found() -> None:
    left, right, addend = numbers(4, 8), numbers(8, 6, seed=1), numbers(6, seed=2)
    right_result = torch.addmm(addend, left, right, beta=2.0, alpha=3.0)
    product = Product("addmm", right_result, left, right, addend, 2.0, 3.0, right_result.clone)
    assert faults_of(product) == []
    assert len(faults_of(product._replace(beta=1.0))) == 4
    assert len(faults_of(product._replace(alpha=2.9))) == 4
    assert len(faults_of(product._replace(addend=None))) == 4


def nested_matrices(*rows: int) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        nested: Tensor = torch.nested.nested_tensor([torch.ones(row, 3) for row in rows])
    return nested


def test_what_cannot_be_checked_is_left_alone() -> None:
    ones, c = torch.ones(3, 3), torch.ones(3, 3)
    # An output that is an input as well: what comes of it differs between processors.
    onto_itself = torch.mm(c, ones, out=c).tolist()
    with ChecksumWindow() as window:
        torch.mm(ones.int(), ones.int())
        torch.mm(ones.to(torch.complex64), ones.to(torch.complex64))
        torch.mm(ones.to("meta"), ones.to("meta"))
        torch.mm(ones.to_sparse(), ones)
        c = torch.ones(3, 3)
        assert torch.addmm(c, ones, ones, out=c).tolist() == [[4.0] * 3] * 3
        c = torch.ones(3, 3)
        assert torch.mm(c, ones, out=c).tolist() == onto_itself
        c = torch.ones(2, 3, 3)
        torch.bmm(c, torch.ones(2, 3, 3), out=c)
        torch.addmm(ones, torch.ones(3, 0), torch.ones(0, 3), beta=0.1)
        torch.addmm(ones, ones, ones, alpha=0)
    assert (window.checked, window.faults, window.problem) == (0, [], None)


def test_of_nested_tensors_the_products_inside_are_checked() -> None:
    with ChecksumWindow() as window:
        torch.bmm(nested_matrices(3, 4), nested_matrices(3, 3))
    assert (window.checked, window.faults, window.problem) == (2, [], None)


@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [
        (torch.float32, False),
        pytest.param(torch.bfloat16, False, marks=pytest.mark.slow),
        pytest.param(torch.float32, True, marks=pytest.mark.slow),
    ],
)
def test_training_with_an_open_window_has_the_bits_and_random_state_of_one_without(
    dtype: torch.dtype, autocast: bool
) -> None:
    def trained() -> training.Trained:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            model = sentinel_runs.wrapped("alone").to(dtype)
            return training.train(model, 2, batch_of=sentinel_runs.batch_of, loss_of=sentinel_runs.step_fn)

    without = trained()
    with ChecksumWindow() as window:
        within = trained()
    assert (within.losses, within.drawn) == (without.losses, without.drawn)
    assert all(torch.equal(*pair) for pair in zip(within.parameters, without.parameters, strict=True))
    assert window.checked > 50
    assert (window.faults, window.problem) == ([], None)


@flips_products
@pytest.mark.parametrize("sticky", [False, True])
def test_a_flip_inside_the_operator_is_found_as_transient_or_sticky(sticky: bool) -> None:
    model = nn.Linear(8, 8)
    with ChecksumWindow() as window, inject_bit_flips(model, [BitFlip("", "matmul", 11, 30, 0, sticky=sticky)]):
        model(numbers(4, 8))
    (fault,) = window.faults
    assert fault.index == (1, 3)
    assert fault.transient is not sticky


def test_a_fault_after_the_operator_is_not_seen() -> None:
    model = nn.Linear(8, 8)
    with ChecksumWindow() as window, inject_bit_flips(model, [BitFlip("", "activation", 11, 30, 0)]) as faults:
        model(numbers(4, 8))
    assert len(faults.applied) == 1
    assert window.faults == []


@flips_products
def test_a_product_of_a_backward_pass_is_marked() -> None:
    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            wrong: Tensor = inner(gradient)
            return wrong

    inner = nn.Linear(4, 4)
    x = torch.ones(2, 4, requires_grad=True)
    with ChecksumWindow() as window, inject_bit_flips(inner, [BitFlip("", "matmul", 0, 30, 0)]):
        inner(x)
    assert [fault.backward for fault in window.faults] == [False]
    with ChecksumWindow() as window, inject_bit_flips(inner, [BitFlip("", "matmul", 0, 30, 0)]):
        Backward.apply(x).sum().backward()  # type: ignore[no-untyped-call]
    assert [fault.backward for fault in window.faults] == [True]


# -- opening and closing ----------------------------------------------------------------------------------------------


def registrations() -> list[str]:
    names = [f"aten::{op}{variant}" for op in ("mm", "addmm", "bmm", "baddbmm") for variant in ("", ".out")]
    return [torch._C._dispatch_dump(name) for name in names]


@takes_kernels_away
def test_closing_and_tidying_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "_PARKED_SEC", 0.0)
    ChecksumWindow.tidy()  # from earlier tests
    before = registrations()
    window = ChecksumWindow()
    ChecksumWindow.tidy()
    for _ in range(2):
        window.open()
        window.open()
        assert window.is_open
        assert registrations() != before
        torch.ones(2, 2) @ torch.ones(2, 2)
        window.tidy()
        assert registrations() != before
        window.close()
        window.close()
        window.tidy()
        window.tidy()
        assert registrations() == before
    assert not window.is_open
    torch.ones(2, 2) @ torch.ones(2, 2)
    assert window.checked == 2


LATER = """
    import threading, torch
    from ddpstats.sentinel.matmul import ChecksumWindow
    torch.set_num_threads(1)
    over = threading.Event()

    def multiply():
        ones = torch.ones(4, 4)
        while not over.is_set():
            ones @ ones

    threads = [threading.Thread(target=multiply) for _ in range(2)]
    for thread in threads:
        thread.start()
    window = ChecksumWindow()
    for _ in range(400):
        with window:
            torch.ones(2, 2) @ torch.ones(2, 2)
    over.set()
    for thread in threads:
        thread.join()
    assert window.checked >= 400 and window.problem is None and window.fault_count == 0
"""


@pytest.mark.slow
def test_windows_may_close_while_other_threads_multiply() -> None:
    done = run(["-c", textwrap.dedent(LATER)])
    assert (done.returncode, done.stderr) == (0, "")


def test_a_forked_child_has_no_window_and_no_lock_of_another_thread() -> None:
    taken, release = threading.Event(), threading.Event()

    def hold() -> None:
        with door._lock:
            taken.set()
            release.wait()

    with ChecksumWindow() as window:
        holder = threading.Thread(target=hold)
        holder.start()
        taken.wait()
        child = os.fork()
        if child == 0:
            multiply_in_the_child(window)
        _, status = os.waitpid(child, 0)
        release.set()
        holder.join()
    assert status == 0


def multiply_in_the_child(window: ChecksumWindow) -> None:
    signal.alarm(20)  # ends it where a lock is held
    try:
        torch.ones(2, 2) @ torch.ones(2, 2)
        closed = not window.is_open and window.checked == 0
        with window:
            torch.ones(2, 2) @ torch.ones(2, 2)
        os._exit(0 if closed and window.checked == 1 else 1)
    finally:
        os._exit(2)


def test_a_window_closes_after_an_exception() -> None:
    window = ChecksumWindow()
    with pytest.raises(KeyError), window:
        raise KeyError
    assert not window.is_open
    assert door._windows == ()


def test_windows_overlap_and_each_counts_what_it_saw() -> None:
    first, second = ChecksumWindow(), ChecksumWindow()
    ones = torch.ones(2, 2)
    first.open()
    ones @ ones
    second.open()
    ones @ ones
    first.close()
    ones @ ones
    second.close()
    assert (first.checked, second.checked) == (2, 2)
    assert door._windows == ()


def test_an_error_in_a_check_is_noted_and_the_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(product: Product) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(door, "doubtful_rows", fail)
    with ChecksumWindow() as window:
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).tolist() == [[2.0, 2.0], [2.0, 2.0]]
    assert isinstance(window.problem, MemoryError)
    assert (window.checked, window.faults, window.unchecked) == (0, [], 1)
    had_news, problem = window.has_news, window.problem
    assert window.take() == ([], 0, problem, 1)
    assert (had_news, window.has_news) == (True, False)


def test_a_window_keeps_no_operand_alive() -> None:
    left = numbers(4, 4)
    gone = weakref.ref(left)
    with ChecksumWindow() as window:
        left @ left
        del left
        gc.collect()
        assert gone() is None
        assert window.checked == 1


def test_another_torch_is_tried_and_refused_if_it_hides_its_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    with ChecksumWindow() as window:
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert window.checked == 1
    monkeypatch.setattr(door, "_sees_a_product", lambda: False)
    with pytest.raises(ConfigError, match=r"torch 2\.99\.0 does not show its matrix products"):
        window.open()
    assert not window.is_open
    assert door._windows == ()


@pytest.mark.slow
def test_a_compiled_program_is_checked_and_not_disturbed() -> None:
    @torch.compile(backend="eager")
    def compiled(x: Tensor) -> Tensor:
        y = x @ x
        torch._dynamo.graph_break()
        return y @ x

    x = numbers(4, 4)
    expected = compiled(x)
    with ChecksumWindow() as window:
        assert torch.equal(compiled(x), expected)
    assert (window.checked, window.problem) == (2, None)

"""Settings of torch that change the last bits of a result are set for a rerun, and put back."""

from __future__ import annotations

import pytest
import torch

from ddpstats._rerun.state import as_in, switches
from tests.programs import run


def test_switches_are_set_and_put_back() -> None:
    before = switches()
    wanted = {"default_dtype": "torch.float64", "cudnn_deterministic": True, "matmul_precision": "high"}
    with as_in({**before, **wanted}):
        assert torch.get_default_dtype() is torch.float64
        assert torch.backends.cudnn.deterministic
        assert torch.get_float32_matmul_precision() == "high"
    assert switches() == before


@pytest.mark.parametrize(
    "name",
    [
        *("cudnn_allow_tf32", "fp16_reduced_precision_reduction", "bf16_reduced_precision_reduction"),
        *("cudnn_enabled", "fp16_accumulation", "mkldnn_enabled", "mkldnn_deterministic"),
        *("sdpa_flash", "sdpa_mem_efficient", "sdpa_math", "sdpa_cudnn"),
        *("sdpa_math_reduced_precision", "attention_fastpath", "fill_uninitialized_memory"),
    ],
)
def test_precision_of_cudnn_and_reductions_and_the_choice_of_attention_are_part_of_a_step(name: str) -> None:
    before = switches()
    with as_in({name: not before[name]}):
        assert switches() == {**before, name: not before[name]}
    assert switches() == before


@pytest.mark.slow
def test_settings_that_are_so_already_are_not_set_again() -> None:
    """torch.use_deterministic_algorithms would import torch's compiler."""
    program = (
        "import sys; from ddpstats._rerun.state import as_in, switches\n"
        "with as_in(switches()): pass\n"
        "print([name for name in ('torch._inductor', 'torch._dynamo') if name in sys.modules])"
    )
    assert run(["-c", program], fresh=True).stdout.strip() == "[]"


def test_a_precision_that_torch_cannot_read_is_left_out() -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        with pytest.raises(RuntimeError):  # otherwise there is nothing to leave out
            torch.get_float32_matmul_precision()
        assert "matmul_precision" not in switches()
        with as_in({"matmul_precision": "high", "threads": torch.get_num_threads()}):
            assert matmul.fp32_precision == "tf32"
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before

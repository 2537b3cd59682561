"""A gradient whose memory is given to somebody else while it is in use: found by comparing two dumps.

Image and text tokens are split, and a layer norm follows for each, directly one after the other. In the backward pass
the gradient of the text tokens is ready, and waits for that of the image. Meanwhile, on another stream, weights are
cast, and the allocator believes that gradient's memory to be free, because nobody recorded that stream: 2,048 of its
3,072 elements are overwritten. Nothing raises an error. With every kernel waited for, it does not happen::

    python examples/memory_stomp.py /tmp/bad --outcome bad
    python examples/memory_stomp.py /tmp/good --outcome good
    ddpstats compare /tmp/bad /tmp/good
    ddpstats compare /tmp/bad --tensor Torch.split.0.backward.input.1 Functional.layer_norm.1.backward.output.0
    ddpstats nan-origin /tmp/bad

The first command finds that what goes into the backward pass of the split is not what goes into it in the good run, in
a contiguous range of 8 KiB. The second is the strongest proof, and needs no good run: what went into the split's
backward pass is the very memory that came out of the layer norm's, at one address, and 8 KiB of it have changed in
between. The third notes which two storages share that memory. Here, on a CPU and without streams, the cast is done at
the moment and in the place where it would happen there.
"""

from __future__ import annotations

import argparse
import ctypes
from pathlib import Path

import torch
from torch import Tensor, nn

from ddpstats.dump import StatsDump

IMAGE, TEXT, WIDTH = 8, 4, 768  # the gradient of the text tokens has 4 x 768 = 3,072 elements
STOMPED = 2048
SUSPECTS = ["layer_norm.0", "layer_norm.1", "Torch.split.0", "Tensor.copy_.0"]


class Layer(nn.Module):
    """Of a model for images and text: both go through one norm, one after the other."""

    def __init__(self, weights: Tensor, is_safe: bool) -> None:
        super().__init__()
        self.post_attention_layernorm, self.mlp = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self._weights, self._is_safe = weights, is_safe

    def forward(self, hidden: Tensor) -> Tensor:
        image, text = torch.split(hidden, [IMAGE, TEXT])
        text.register_hook(self._cast_meanwhile)  # type: ignore[no-untyped-call]
        both = torch.cat([self.post_attention_layernorm(image), self.post_attention_layernorm(text)])
        out: Tensor = hidden + self.mlp(both)
        return out

    def _cast_meanwhile(self, gradient: Tensor) -> None:
        """The other stream's work: the next weights, from bfloat16, into memory that the allocator gave."""
        block = memory_of(gradient, STOMPED)
        if self._is_safe:
            block = block.clone()  # the same bytes in a place of their own
        block.copy_(self._weights)


def memory_of(tensor: Tensor, elements: int) -> Tensor:
    """Its first elements, as a tensor with a storage of its own: what an allocator hands out a second time."""
    memory = (ctypes.c_char * (elements * tensor.element_size())).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype)


def train(dump_path: Path, is_safe: bool) -> float:
    """One step, dumped without disturbing the order of things; the norm of the gradient that goes on."""
    config = {
        "task": "tensor",
        "dump_path": str(dump_path),
        "step": [0],
        "level": "mix",
        "async_dump": True,
        "tensor": {"scope": [], "list": SUSPECTS, "data_mode": ["all"]},
    }
    torch.manual_seed(0)
    model = Layer(torch.randn(STOMPED).bfloat16(), is_safe)
    hidden = torch.randn(IMAGE + TEXT, WIDTH, requires_grad=True)
    dump = StatsDump(config, model=model)
    dump.start()
    model(hidden).square().mean().backward()
    dump.step()
    assert hidden.grad is not None
    norm = float(hidden.grad.norm())
    print(f"norm of the gradient {norm:.4g}")
    return norm


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Two layer norms in a row, and memory that is given out too early.")
    parser.add_argument("dump_path", type=Path, nargs="?", default=Path("memory_stomp_dump"))
    parser.add_argument("--outcome", choices=["bad", "good"], default="bad")
    given = parser.parse_args()
    train(given.dump_path, given.outcome == "good")
    print("now, with BAD and GOOD the directories of the two runs: ddpstats compare BAD GOOD; ddpstats nan-origin BAD")

"""Gradients that grow layer by layer until they overflow: the cause found from a dump of one step.

Two samples of different length are packed into one row of tokens, and an attention kernel for variable lengths gets
the causal mask. It wants that as [longest, longest], reads it row by row from flat memory, and cannot know that it was
given [total, total]: the zeros and ones land in wrong places. In the forward pass nothing is to be seen. In the
backward pass every attention makes the gradient larger, until it is infinite in a layer that did nothing special::

    python examples/attention_mask.py /tmp/wrong --mask wrong
    ddpstats nan-origin /tmp/wrong

names the attention. With ``--mask right`` nothing is found. ``scripts/launch.sh 1 examples/attention_mask.py DIR``
works as well.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddpstats.dump import StatsDump

LENGTHS = (17, 7)
LAYERS, WIDTH, HEADS, WORDS = 8, 32, 2, 50
_SMALLEST_SUM = 1e-6


class _Kernel(torch.autograd.Function):
    """Attention over packed samples, as a fused operator does it: fast, and trusting its arguments.

    The forward pass keeps each row's largest score and its sum of exponentials. The backward pass computes the
    probabilities anew from these, and does not read the mask again below the diagonal, where a causal mask is zero.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        longest = max(LENGTHS)
        flat = mask.reshape(-1)  # whatever its shape is: a row has `longest` elements
        outputs, saved = [], []
        for start, length in zip((0, LENGTHS[0]), LENGTHS, strict=True):
            rows, columns = torch.arange(length)[:, None], torch.arange(length)[None, :]
            hidden = flat[rows * longest + columns].bool()
            queries, keys, values = (part[start : start + length].transpose(0, 1) for part in (q, k, v))
            scores = queries @ keys.transpose(1, 2) / math.sqrt(q.shape[-1])
            largest = scores.amax(-1, keepdim=True)
            weights = (scores - largest).exp().masked_fill(hidden, 0.0)
            total = weights.sum(-1, keepdim=True).clamp_min(_SMALLEST_SUM)
            outputs.append((weights / total @ values).transpose(0, 1))
            saved += [largest, total]
        output = torch.cat(outputs)
        ctx.save_for_backward(q, k, v, output, *saved)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, output, *saved = ctx.saved_tensors
        found = []
        for number, (start, length) in enumerate(zip((0, LENGTHS[0]), LENGTHS, strict=True)):
            largest, total = saved[2 * number : 2 * number + 2]
            parts = (part[start : start + length].transpose(0, 1) for part in (q, k, v, output, gradients[0]))
            queries, keys, values, out, gradient = parts
            scale = 1 / math.sqrt(q.shape[-1])
            scores = queries @ keys.transpose(1, 2) * scale
            weights = ((scores - largest).exp() / total).tril()
            of_scores = weights * (gradient @ values.transpose(1, 2) - (gradient * out).sum(-1, keepdim=True)) * scale
            of_keys, of_values = of_scores.transpose(1, 2) @ queries, weights.transpose(1, 2) @ gradient
            found.append([part.transpose(0, 1) for part in (of_scores @ keys, of_keys, of_values)])
        of_q, of_k, of_v = (torch.cat(parts) for parts in zip(*found, strict=True))
        return of_q, of_k, of_v, None


class FusedAttention(nn.Module):
    """The kernel."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        output: Tensor = _Kernel.apply(q, k, v, mask)  # type: ignore[no-untyped-call]
        return output


class Block(nn.Module):
    """Of a transformer: attention and a feed-forward part, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.core, self.out = nn.Linear(WIDTH, 3 * WIDTH), FusedAttention(), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).view(-1, 3, HEADS, WIDTH // HEADS).unbind(1)
        x = x + self.out(self.core(q, k, v, mask).flatten(1))
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, mask)
        logits: Tensor = self.head(x)
        return logits


def make_mask(kind: str) -> Tensor:
    """Causal, 1 is hidden: [longest, longest] if ``kind`` is "right", [total, total] if it is "wrong"."""
    size = max(LENGTHS) if kind == "right" else sum(LENGTHS)
    return torch.ones(size, size, dtype=torch.uint8).triu(1)


def train(dump_path: Path, mask: str) -> float:
    """One step, dumped; the norm of all gradients."""
    config = {
        "task": "statistics",
        "dump_path": str(dump_path),
        "rank": [],
        "step": [0],
        "level": "mix",
        "enable_dataloader": False,
        "statistics": {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"},
    }
    torch.manual_seed(0)
    model = Model()
    tokens = torch.randint(WORDS, (sum(LENGTHS) + 1,))
    dump = StatsDump(config, model=model)
    dump.start()
    loss = nn.functional.cross_entropy(model(tokens[:-1], make_mask(mask)), tokens[1:])
    loss.backward()  # type: ignore[no-untyped-call]
    dump.step()
    norm = float(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm())
    print(f"loss {loss.item():.4f}, norm of the gradients {norm:.4g}")
    return norm


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A variable-length attention that is given a mask of another shape.")
    parser.add_argument("dump_path", type=Path, nargs="?", default=Path("attention_mask_dump"))
    parser.add_argument("--mask", choices=["right", "wrong"], default="wrong")
    given = parser.parse_args()
    train(given.dump_path, given.mask)
    print(f"now: ddpstats nan-origin {given.dump_path}")

"""Replicas that are not bit-identical: which ranks, which tensor, which element and bit, and what to suspect. Pure.

1. Ranks that hold the same are a group. Damage does not strike twice alike, so the one largest group of at least two
   ranks is right, and the others are the culprits. Where there is none (two ranks, two against two), nobody is.
2. Of the first tensor that differs, the first element that differs is compared bit by bit.
3. How much differs says what to suspect: one element is hardware, many are software.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ddpstats._base.text import count_of, holders_lines, ranks_text, shorten

Kind = Literal["parameter", "gradient", "buffer"]

# By cause: what was there before the backward pass comes first.
KINDS: tuple[Kind, ...] = ("parameter", "buffer", "gradient")

_SOFTWARE = (
    "Look for noise added after the reduce, a learning rate or optimizer state of one rank's own, a step skipped on "
    "one rank, parameters changed outside of the optimizer."
)
_MANY_PARAMETERS = (
    "Many parameters differ: replicas may also be meant to differ for now (post-local SGD), or be those of a "
    "data-parallel group other than the sentinel's."
)
_MANY = 3

_SHOWN_NAMES = 3
_SHOWN_BITS = 4
_FRACTION_BITS = {
    "float64": 52,
    "float32": 23,
    "float16": 10,
    "bfloat16": 7,
    "float8_e4m3fn": 3,
    "float8_e4m3fnuz": 3,
    "float8_e5m2": 2,
    "float8_e5m2fnuz": 2,
}


@dataclass(frozen=True)
class Split:
    """Ranks by what they hold.

    Attributes:
        groups: ranks that hold the same, ascending; the largest group first, then the one with the lowest rank.
    """

    groups: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, by_rank: Mapping[int, object]) -> Split:
        """``by_rank``: what each rank holds: a digest, the bits of an element, a shape in words."""
        ranks_of: dict[object, list[int]] = {}
        for rank in sorted(by_rank):
            ranks_of.setdefault(by_rank[rank], []).append(rank)
        return cls(tuple(sorted(map(tuple, ranks_of.values()), key=lambda ranks: (-len(ranks), ranks[0]))))

    @property
    def equal(self) -> bool:
        """Whether all ranks hold the same."""
        return len(self.groups) <= 1

    @property
    def majority(self) -> tuple[int, ...]:
        """The one largest group of at least two ranks; empty where there is none."""
        sizes = [len(group) for group in self.groups]
        alone = sizes[:1] != sizes[1:2]
        return self.groups[0] if sizes and sizes[0] > 1 and alone else ()

    @property
    def minority(self) -> tuple[int, ...]:
        """The ranks outside of the majority; empty where there is no majority."""
        return tuple(sorted(rank for group in self.groups[1:] for rank in group)) if self.majority else ()


@dataclass(frozen=True)
class Element:
    """The first element of a tensor that differs.

    Attributes:
        index: into the tensor; () of a 0-d one.
        dtype: as in ``str(torch.float32)``, without "torch.".
        values: rank -> the number in words.
        bits: rank -> the same as an unsigned integer of ``width`` bits.
        width: bits of one element.
    """

    index: tuple[int, ...]
    dtype: str
    values: Mapping[int, str]
    bits: Mapping[int, int]
    width: int

    @property
    def flipped(self) -> tuple[int, ...]:
        """The bits, ascending from the lowest one (0), in which any two ranks differ."""
        held = list(self.bits.values())
        differing = 0
        for one in held[1:]:
            differing |= one ^ held[0]
        return tuple(bit for bit in range(self.width) if differing >> bit & 1)

    @property
    def lines(self) -> list[str]:
        digits = (self.width + 3) // 4
        shown = {rank: f"{self.values[rank]}  0x{self.bits[rank]:0{digits}x}" for rank in sorted(self.bits)}
        place = f" [{', '.join(map(str, self.index))}]" if self.index else ""
        return [f"First element{place}:", *holders_lines(shown), f"  {self._flipped_text()}"]

    def _flipped_text(self) -> str:
        flipped = self.flipped
        named = shorten((f"{bit}{self._field(bit)}" for bit in reversed(flipped)), _SHOWN_BITS)
        verb = "bit" if len(flipped) == 1 else "bits"
        text = f"They differ in {verb} {named}."
        zeros = {"0.0", "-0.0"}
        if set(self.values.values()) == zeros:
            text += " As numbers 0.0 and -0.0 are equal, as bits they are not."
        return text

    def _field(self, bit: int) -> str:
        fraction = _FRACTION_BITS.get(self.dtype)
        if fraction is None:
            return ""
        if bit == self.width - 1:
            return " (sign)"
        return " (exponent)" if bit >= fraction else " (fraction)"


@dataclass(frozen=True)
class Divergence:
    """Replicas that should be bit-identical and are not. Equal on every rank.

    Attributes:
        kind: of the first tensor that differs: "parameter", "buffer" or "gradient", looked at in that order.
        name: its name, as in ``named_parameters`` or ``named_buffers``; that of its parameter for a gradient.
        held: rank -> what it holds there: a digest, or where ``structural`` is set the dtype and shape in words.
        others: of every other tensor that differs: kind, name, rank -> what it holds.
        structural: ranks do not even hold tensors of one dtype and shape.
        element: the first that differs; None where none was looked for, or a second look found no difference.
        differing_elements: how many differ in the block of ``block_elements`` around it.
        alone: no other block of the tensor differs.
        described: dtype and shape, in words.
    """

    kind: Kind
    name: str
    held: Mapping[int, object]
    others: Sequence[tuple[Kind, str, Mapping[int, object]]] = ()
    structural: bool = False
    element: Element | None = None
    differing_elements: int = 0
    block_elements: int = 0
    alone: bool = False
    described: str = ""

    @property
    def culprit_ranks(self) -> tuple[int, ...]:
        """Global ranks in the minority, in any tensor, ascending; empty where there is no majority."""
        splits = [Split.of(held) for held in (self.held, *(held for _, _, held in self.others))]
        return tuple(sorted({rank for split in splits for rank in split.minority}))

    @property
    def message(self) -> str:
        """All of that for people: what differs, who is to blame for it, and what to suspect."""
        split = Split.of(self.held)
        return "\n".join([_headline(self, split), *_what_lines(self), *_other_lines(self), *_hint(self, split)])


def _headline(found: Divergence, split: Split) -> str:
    described = f" ({found.described})" if found.described else ""
    text = f"replicas differ, first in {found.kind} {found.name}{described}: "
    if split.majority:
        return f"{text}{ranks_text(split.minority)} against {ranks_text(split.majority)}."
    return text + " against ".join(ranks_text(group) for group in split.groups[:_SHOWN_NAMES]) + "."


def _what_lines(found: Divergence) -> list[str]:
    if found.structural:
        return holders_lines({rank: str(found.held[rank]) for rank in sorted(found.held)})
    if found.element is None:
        return ["A second look at it found no difference."]
    if found.alone and found.differing_elements == 1:
        return [*found.element.lines, "No other element of this tensor differs."]
    beyond = "" if found.alone else ", and other blocks differ, too"
    count = f"{found.differing_elements} of the {found.block_elements} elements"
    return [*found.element.lines, f"{count} that were compared around it differ{beyond}."]


def _other_lines(found: Divergence) -> list[str]:
    if not found.others:
        return ["No other tensor differs."] if not found.structural else []
    lines = ["Other tensors that differ:"]
    for kind in KINDS:
        names = [name for other, name, _ in found.others if other == kind]
        if names:
            lines.append(f"  {count_of(len(names), f'{kind}s')}: {shorten(names, _SHOWN_NAMES)}")
    return lines


def _hint(found: Divergence, split: Split) -> list[str]:
    lines = [_cause_text(found)]
    if not found.structural and [found.kind, *(kind for kind, _, _ in found.others)].count("parameter") >= _MANY:
        lines.append(_MANY_PARAMETERS)
    if found.kind == "gradient" and not found.structural:
        lines.append("All parameters are equal: it happened in this step, in the reduce or after it.")
    is_said = found.structural and _only_buffers(found)
    if not is_said and (found.kind == "buffer" or any(kind == "buffer" for kind, _, _ in found.others)):
        lines.append("A buffer that each rank may have for itself belongs into `ignore`.")
    if not split.majority:
        lines.append(_no_majority_text(split))
    return lines


def _cause_text(found: Divergence) -> str:
    if found.structural:
        return _structural_text(found)
    if found.element is None:
        return "So a digest was computed wrongly, which is hardware, or something writes into this tensor at any time."
    if not (found.alone and found.differing_elements == 1):
        return f"Many elements: software first. {_SOFTWARE}"
    if found.others:
        return (
            "One element of this tensor, and other tensors differ, too: if as little of them, suspect hardware; if "
            f"much, software. {_SOFTWARE}"
        )
    what = "One flipped bit" if len(found.element.flipped) == 1 else "One damaged element"
    whose = ranks_text(found.culprit_ranks) if found.culprit_ranks else "one of these ranks"
    return f"{what}: the hardware of {whose} is the first suspect."


def _structural_text(found: Divergence) -> str:
    kinds = {found.kind, *(kind for kind, _, _ in found.others)}
    if kinds == {"gradient"}:
        return (
            "The ranks' programs differ: look for a backward pass, zero_grad() or a frozen parameter on some ranks "
            "only. The elements were not compared."
        )
    models = "The ranks' models differ: every rank must build the same one. The elements were not compared."
    if _only_buffers(found):
        return (
            "A buffer of another shape may be a cache that each rank has for itself, such as one as long as its "
            f"batches: then it belongs into `ignore`. Else: {models[0].lower()}{models[1:]}"
        )
    return models


def _only_buffers(found: Divergence) -> bool:
    return {found.kind, *(kind for kind, _, _ in found.others)} == {"buffer"}


def _no_majority_text(split: Split) -> str:
    sides = "two sides" if len(split.groups) == 2 else f"{len(split.groups)} sides"
    return (
        f"There is no majority among {sides}, so which one is right is not known: a third replica or "
        "replay_every_steps would decide."
    )

"""Trees that ranks hold, matched by name: what the integrations of torchmetrics, torcheval and accelerate share.

What travels are tensors and plain values. A metric itself does not: no class is looked up because another rank named
it, so a rank never runs code that its own program did not bring.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from ddpstats._base.paths import Path, format_path
from ddpstats._base.text import first_line, holders_lines
from ddpstats._ranks.comm import describe_group, group_ranks, resolve_group
from ddpstats._ranks.exchange import InvalidLeaf
from ddpstats._ranks.gather import gather_trees
from ddpstats.errors import SchemaConflict

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")


class Kind(NamedTuple):
    """The kind of what one rank holds; ``detail`` is compared between the ranks that have one."""

    what: str
    detail: str | None = None

    def __str__(self) -> str:
        return f"{self.what}{self.detail or ''}"


def unite(by_rank: Mapping[int, Mapping[KeyT, ValueT]]) -> dict[KeyT, dict[int, ValueT]]:
    """Return what each rank holds under each key, in the order in which the ranks first list the keys."""
    united: dict[KeyT, dict[int, ValueT]] = {}
    for rank, items in by_rank.items():
        for key, value in items.items():
            united.setdefault(key, {})[rank] = value
    return united


class Matching:
    """One call of a library on the ranks of one group.

    Args:
        call: its name in messages, the same on all ranks.
        group: the process group; None: the default one.
        advice: the end of a message about things that do not fit together.
    """

    def __init__(self, call: str, group: Any, advice: str) -> None:
        process_group = resolve_group(group)
        assert process_group is not None
        self._call, self._group, self._advice = call, process_group, advice
        self.ranks = group_ranks(process_group)

    def gather(self, tree: Any, step: str = "") -> dict[int, Any]:
        """Return every rank's tree by its global rank; see `gather_trees`. Collective."""
        trees = gather_trees(tree, name=self._call + step, group=self._group)
        return dict(zip(self.ranks, trees, strict=True))

    def check(self, path: Path, kinds: Mapping[int, Kind]) -> None:
        """Raise `SchemaConflict` where the ranks hold different kinds under ``path``."""
        details = {kind.detail for kind in kinds.values()} - {None}
        if len({kind.what for kind in kinds.values()}) > 1 or len(details) > 1:
            raise self.conflict(path, {rank: str(kind) for rank, kind in kinds.items()})

    def conflict(self, path: Path, by_rank: Mapping[int, str], reason: str = "") -> SchemaConflict:
        """Return the error about what the ranks hold under ``path``."""
        name, group = format_path(path) or None, describe_group(self._group)
        where = f" under {name!r}" if name else ""
        lines = [f"{self._call}: ranks of {group} hold what cannot be combined{where}:", *holders_lines(by_rank)]
        lines += [reason] if reason else []
        return SchemaConflict("\n".join([*lines, self._advice]), ranks=by_rank, path=name, group=group)

    def share_results(
        self, holders: Mapping[str, Mapping[int, Any]], result_of: Callable[[str], Any], device: torch.device
    ) -> dict[str, Any]:
        """Return the results of the members that this rank lacks. Collective if some rank lacks some member.

        The first rank that has such a member sends its result. If it cannot be had or sent, every rank raises
        `InvalidStats`.
        """
        senders = {name: next(iter(held)) for name, held in holders.items() if len(held) < len(self.ranks)}
        if not senders:
            return {}
        own_rank = dist.get_rank()

        def results() -> dict[str, Any]:
            return {name: _result(name, result_of) for name, rank in senders.items() if rank == own_rank}

        sent = unite(self.gather(results, ", results"))
        return {
            name: unpack(sent[name][rank], device) for name, rank in senders.items() if own_rank not in holders[name]
        }


def _result(name: str, result_of: Callable[[str], Any]) -> Any:
    try:
        return pack(result_of(name))
    except Exception as error:
        raise InvalidLeaf((str(name),), error_text(error)) from error


def error_text(error: Exception) -> str:
    """Return an error in one line, for other ranks."""
    return f"{type(error).__name__}: {first_line(error)[:300]}"


# -- what `gather_trees` does not take as it is ------------------------------------------------------------------------

_PAIRS = "ddpstats: pairs"


def pack(tree: Any) -> Any:
    """Return ``tree`` for `gather_trees`: dicts with other keys than str and int as pairs."""
    if isinstance(tree, dict):
        items = {key: pack(value) for key, value in tree.items()}
        return items if all(type(key) in (str, int) for key in items) else (_PAIRS, list(map(list, items.items())))
    if isinstance(tree, (list, tuple)):
        return [pack(item) for item in tree] if isinstance(tree, list) else tuple(pack(item) for item in tree)
    if isinstance(tree, float):
        return float(tree)  # numpy's float64 is a float
    return tree


def unpack(tree: Any, device: torch.device | None = None) -> Any:
    """Return what was packed, with its tensors on ``device`` (None: where they are)."""
    if isinstance(tree, torch.Tensor):
        return tree if device is None else tree.to(device)
    if isinstance(tree, tuple) and len(tree) == 2 and isinstance(tree[0], str) and tree[0] == _PAIRS:
        return {key: unpack(value, device) for key, value in tree[1]}
    if isinstance(tree, dict):
        return {key: unpack(value, device) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(unpack(item, device) for item in tree)
    return tree

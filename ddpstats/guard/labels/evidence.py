"""What is known of a label besides its text: worked out where ranks differ, and not before."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpstats.guard.event import Evidence
from ddpstats.guard.labels.calls import argument_names, names_passed
from ddpstats.guard.labels.fate import Fate, Turn, fate_of
from ddpstats.guard.labels.infer import Chain, Inferred
from ddpstats.guard.labels.source import names_in
from ddpstats.guard.labels.spelled import spells

_MAX_NAMES = 256


def evidence_of(found: Inferred) -> Evidence:
    """Of the innermost name, and through it of those further out."""
    evidence: Evidence | None = None
    files = frozenset(place.code.co_filename for place in found.chain.places)
    for level in range(len(found.levels) - 1, -1, -1):
        key, beside = found.keys[level], found.levels[level]
        evidence = Evidence(
            key,
            beside.names[:_MAX_NAMES],
            beside.source,
            _fate(found.chain, level),
            spells(key, files),
            beside.aliases.get(key, ()),
            found.beside,
            found.chain.is_known,
            evidence,
            found.chain.steps[level][0].chosen_by,
        )
    assert evidence is not None
    return evidence


def _fate(chain: Chain, level: int) -> Fate:
    fate = chain.fates.get(level)
    if fate is None:
        fate = chain.fates[level] = fate_of(list(_turns(chain, level)), chain.fresh)
    return fate


def _turns(chain: Chain, level: int) -> Iterator[Turn]:
    """The functions from the one whose loop has the name in to the collective."""
    step, at = chain.steps[level]
    names = frozenset(node.id for name in step.names for node in names_in(name))
    texts = frozenset(name.value for name in step.names if isinstance(name, ast.Constant) and type(name.value) is str)
    for index in range(at, -1, -1):
        place = chain.places[index]
        if place.file is None or place.node is None:
            continue
        loop = step.loop if index == at else None
        within = (
            loop if loop is not None and place.file.is_inside(place.node, loop) else place.file.scope_of(place.node)
        )
        carriers = frozenset(argument_names(place.node)) if index == 0 else frozenset()
        yield Turn(place.file, place.node, within, names - carriers, texts, carriers)
        if index > 0:
            names = names_passed(place.node, chain.places[index - 1].owner, names, bool(texts))

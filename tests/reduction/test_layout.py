"""Schemas, layouts and agreement: pure functions of plain values."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from ddpstats._reduction.layout import NONE, PRESENT, Layout, place, prune, select
from ddpstats._reduction.layout_agreement import agree, overlay, union
from ddpstats._reduction.schema import NONE_LEAF, Container, Node, iter_leaves, iter_slots, leaf, slot_count
from ddpstats._reduction.wire import Holding, decode_schema, encode_schema
from ddpstats.errors import SchemaConflict

MEAN, SUM = leaf("mean"), leaf("sum")


def mapping(**children: Node) -> Container:
    return Container(("dict",), tuple(children), tuple(children.values()))


def sequence(*children: Node, kind: str = "list") -> Container:
    return Container((kind,), tuple(range(len(children))), children)


def schemas() -> st.SearchStrategy[Node]:
    leaves = st.sampled_from([MEAN, MEAN, SUM, NONE_LEAF, leaf("max"), leaf("mean", ("float32",))])
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.dictionaries(st.one_of(st.text(max_size=3), st.integers(-2, 2)), inner, min_size=1, max_size=4).map(
                lambda found: Container(("dict",), tuple(found), tuple(found.values()))
            ),
            st.lists(inner, min_size=1, max_size=3).map(lambda found: sequence(*found)),
        ),
        max_leaves=8,
    )


def text_of(held: list[tuple[Node, tuple[int, ...]]]) -> str:
    try:
        return repr(union(held))
    except SchemaConflict as error:
        return str(error)


def test_union_keeps_the_order_of_ranks_and_of_positions() -> None:
    first = mapping(b=MEAN, l1=sequence(MEAN))
    second = mapping(a=MEAN, l1=sequence(MEAN, MEAN), b=MEAN)
    assert union([(first, (0,)), (second, (1,))]) == mapping(b=MEAN, l1=sequence(MEAN, MEAN), a=MEAN)


def test_conflict_names_path_ranks_and_what_each_holds() -> None:
    with pytest.raises(SchemaConflict) as caught:
        union([(mapping(x=mapping(y=MEAN)), (0, 2)), (mapping(x=mapping(y=SUM)), (1,))])
    assert str(caught.value).splitlines() == [
        "ranks hold different things under 'x/y':",
        "  ranks 0, 2: a leaf (mean)",
        "  rank 1: a leaf (sum)",
        "Give each path one structure and one reduce op on all ranks, or use different keys. Nothing was reduced.",
    ]
    assert (caught.value.path, caught.value.ranks) == ("x/y", (0, 1, 2))


def test_many_conflicts_are_capped() -> None:
    left = mapping(**{f"k{i}": MEAN for i in range(9)})
    right = mapping(**{f"k{i}": SUM for i in range(9)})
    with pytest.raises(SchemaConflict, match="and 4 more paths"):
        union([(left, (0,)), (right, (1,))])


@given(st.lists(schemas(), min_size=1, max_size=3))
def test_every_rank_can_be_placed_in_the_union(found: list[Node]) -> None:
    held = [(schema, (rank,)) for rank, schema in enumerate(found)]
    try:
        layout = Layout(union(held))
    except SchemaConflict:
        return
    codes = [0.0] * layout.size
    for schema in found:
        placement = place(schema, layout)
        assert not placement.stale
        assert len(set(placement.slots)) == len(placement.slots) == len(list(iter_leaves(schema)))
        codes = [a + b for a, b in zip(codes, placement.codes, strict=True)]
    paths = {path for schema in found for path, leaf in iter_leaves(schema) if leaf.op != "none"}
    shown = [path for path, _ in iter_leaves(select(layout, codes).schema)]
    assert paths <= set(shown)
    assert len(set(shown)) == len(shown)


@given(schemas(), schemas())
def test_overlay_holds_the_new_whole(base: Node, new: Node) -> None:
    layout = Layout(overlay(base, new))
    assert not place(new, layout).stale
    assert not place(new, Layout(overlay(layout.root, new))).stale
    assert overlay(layout.root, new) == layout.root  # nothing is renegotiated twice


@given(schemas())
def test_slots_are_numbered_depth_first_and_pruning_keeps_their_order(root: Node) -> None:
    layout = Layout(root)
    assert len(list(iter_slots(root))) == slot_count(root) == layout.size
    assert prune(root, b"\1" * layout.size)[0] == root
    kept, slots = prune(root, bytes(slot % 2 for slot in range(layout.size)))
    assert list(slots) == sorted(slots)
    assert len(slots) == len(list(iter_leaves(kept)))


@given(schemas())
def test_wire_round_trip(schema: Node) -> None:
    assert decode_schema(encode_schema(schema)) == schema


def test_markers_tell_kinds_apart_call_by_call() -> None:
    layout = Layout(union([(sequence(MEAN), (0,)), (sequence(MEAN, kind="tuple"), (1,))]))
    assert layout.size == 3
    for kinds in (["list"], ["tuple"], ["list", "tuple"]):
        codes = [0.0] * 3
        for kind in kinds:
            codes = [a + b for a, b in zip(codes, place(sequence(MEAN, kind=kind), layout).codes, strict=True)]
        schema = select(layout, codes).schema
        assert isinstance(schema, Container)
        assert schema.kinds == tuple(kinds)


def test_none_matches_any_container() -> None:
    layout = Layout(union([(mapping(x=NONE_LEAF), (0,)), (mapping(x=mapping(y=MEAN)), (1,))]))
    assert list(place(mapping(x=NONE_LEAF), layout).codes) == [NONE, 0.0]
    assert list(place(mapping(x=mapping(y=MEAN)), layout).codes) == [0.0, PRESENT]
    assert select(layout, [2.0 * NONE, 0.0]).schema == mapping(x=NONE_LEAF)


def test_agreement_extends_the_layout() -> None:
    base = Layout(mapping(old=MEAN))
    got = agree([(Holding((), mapping(a=MEAN)), (0,)), (Holding((), mapping(b=MEAN)), (1,))], base, "the group")
    assert got.root == mapping(old=MEAN, a=MEAN, b=MEAN)

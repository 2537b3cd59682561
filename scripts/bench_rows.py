"""The table: what was to be reached, and what was."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from _bench_checks import ChecksCosts
from _bench_costs import ImportCost, Memory
from _bench_loop import Spread, Timings
from _bench_sentinel import Costs
from bench_guard import Samples, ratio
from bench_reduction import Measured

LEAF_REACH = {10: 7.0, 50: 28.0, 1_000: 200.0}
BARE_REACH = {10: (1.2, 1.2), 50: (1.3, 1.3), 1_000: (1.7, 1.7), 100_000: (15.0, 40.0)}
"""Floats, tensors."""
ALTERNATING_REACH = 1.1
PATH_BYTES, FIRST_BYTES, STEADY_BYTES, IMPORT_MS = 64.0, 600.0, 64.0, 50.0
GUARD_REACH = {
    "1 float": {"off": 1.0, "step": 1.4, "strict": 1.7, "strict, over the store": 3.5},
    "1M floats": {"off": 1.0, "step": 1.1, "strict": 1.2, "strict, over the store": 1.4},
}
LABEL_REACH = {"nothing to find": 4.0, "a dict's walk": 30.0}  # microseconds
SENTINEL_REACH = 1.01, 1.005, 1.005, 1.3  # layers 1 to 4
CAPTURE_REACH = 1.01
CHECKS_REACH = {"plain": 1.06, "bare": 1.02}  # of all checks in one call, and stats of ten keys in a window
CHECKS_COLLECTIVES = 1
WINDOW_ADD_REACH = 2.5
WINDOW_FLUSH_REACH = 0.05
DUMP_REACH = {"idle": 1.01, "L0": 2.0, "L1": 8.0, "mix": 10.0}
DUMP_ASYNC_REACH = 1.0
INTEGRATION_REACH = {"lightning": 3.0, "torchmetrics": 3.0, "torcheval": 3.0}
"""Where the library itself issues several collectives per key."""
_NOISE = 2.0
GATED_WORLD = 2  # more ranks than that share the cores of a small machine, and its scheduler is what one measures


@dataclass
class Findings:
    """All that was measured; what was left out is missing."""

    timed: list[Measured] = field(default_factory=list)
    new_keys: dict[int, list[float]] = field(default_factory=dict)  # new keys in each call -> seconds per call
    payloads: dict[str, list[int]] = field(default_factory=dict)  # "2 ranks" -> bytes, per key count
    payload_keys: Sequence[int] = ()
    memory: tuple[int, Memory] | None = None  # keys, bytes
    imported: ImportCost | None = None
    window_adds: dict[int, Samples] = field(default_factory=dict)  # keys -> "add", "float" -> seconds per call
    window_flushes: dict[int, Timings] = field(default_factory=dict)  # keys -> "window", "reduce"
    guard: dict[str, Samples] = field(default_factory=dict)  # size -> variant -> seconds per call
    labels: dict[str, list[float]] = field(default_factory=dict)  # what is walked -> seconds of the processor a label
    integrations: dict[str, Samples] = field(default_factory=dict)  # library -> "stock", "installed" -> seconds
    capture: dict[int, tuple[Timings, dict[str, float]]] = field(default_factory=dict)
    """Milliseconds of a step -> ("plain", "capture" -> seconds; part -> microseconds)."""
    capture_memory: float | None = None
    """Peak memory of a step that is captured, less that of a plain step, in multiples of the parameters."""
    sentinel: dict[int, Costs] = field(default_factory=dict)  # milliseconds of a step -> costs
    exam_memory: dict[str, float] = field(default_factory=dict)  # layer -> multiples of the parameters
    checks: ChecksCosts | None = None
    dump: Timings | None = None  # a step of each kind
    msprobe: dict[str, Timings | None] = field(default_factory=dict)  # level -> plain steps, and those it dumps
    ddp_step: Samples = field(default_factory=dict)
    detail: dict[str, Samples] = field(default_factory=dict)  # "plain", "DETAIL" -> size -> seconds


@dataclass(frozen=True)
class Row:
    """One line: ``reach`` None is reported without a verdict; ``measured`` None was skipped."""

    what: str
    measured: float | None
    reach: float | None = None
    at_least: bool = False
    unit: str = "x"
    quartiles: Spread | None = None

    @property
    def is_short(self) -> bool:
        if self.reach is None or self.measured is None:
            return False
        return self.measured < self.reach if self.at_least else self.measured > self.reach

    @property
    def is_noisy(self) -> bool:
        """Rounds that differ this much had other programs' time in them: then even the median may be anything."""
        return self.quartiles is not None and self.quartiles.upper > _NOISE * self.quartiles.lower

    @property
    def verdict(self) -> str:
        if self.reach is None:
            return "-"
        return "noisy" if self.is_noisy else "short" if self.is_short else "ok"

    def cells(self) -> tuple[str, ...]:
        reach = "-" if self.reach is None else f"{'>=' if self.at_least else '<='} {_number(self.reach)} {self.unit}"
        spread = self.quartiles
        between = f"{_number(spread.lower)} .. {_number(spread.upper)}" if spread else ""
        measured = "skipped" if self.measured is None else f"{_number(self.measured)} {self.unit}"
        return self.what, reach, measured, between, self.verdict


def rows_of(found: Findings) -> list[Row]:
    rows: list[Row] = []
    for measured in found.timed:
        rows += _against_leaves(measured)
    for measured in found.timed:
        rows += _against_bare(measured)
    for measured in found.timed:
        rows += _alternating(measured)
    for measured in found.timed:
        rows += _per_rank(measured)
    return (
        rows
        + _new_key_rows(found)
        + _payload_rows(found)
        + _memory_rows(found)
        + _import_rows(found)
        + _window_rows(found)
        + _guard_rows(found)
        + _capture_rows(found)
        + _sentinel_rows(found)
        + _checks_rows(found)
        + _dump_rows(found)
        + _integration_rows(found)
    )


def _integration_rows(found: Findings) -> list[Row]:
    rows = []
    for library, samples in found.integrations.items():
        spread = Spread.of([a / b for a, b in zip(samples["stock"], samples["installed"], strict=True)])
        rows.append(
            Row(
                f"{library}, a step that logs 10 keys: faster than stock",
                spread.median,
                INTEGRATION_REACH.get(library),
                at_least=True,
                quartiles=spread,
            )
        )
    return rows


def _window_rows(found: Findings) -> list[Row]:
    rows = []
    for keys, samples in found.window_adds.items():
        for name, leaves in (("add", "tensors"), ("marked", "leaves, most of them marked")):
            spread = Spread.of([a / b for a, b in zip(samples[name], samples["float"], strict=True)])
            what = f"window, add of {keys:,} {leaves} / float() of as many"
            rows.append(Row(what, spread.median, WINDOW_ADD_REACH, quartiles=spread))
    for keys, timings in found.window_flushes.items():
        what = f"window, 50 adds of {keys:,} tensors and a flush / 50 reductions"
        rows.append(_ratio_row(what, timings, "window", "reduce", WINDOW_FLUSH_REACH))
    return rows


def _guard_rows(found: Findings) -> list[Row]:
    rows = []
    for size, samples in found.guard.items():
        for variant in samples:
            if variant != "plain":
                spread = ratio(samples, variant)
                rows.append(
                    Row(f"guard {variant}, {size} / plain", spread.median, GUARD_REACH[size][variant], quartiles=spread)
                )
        if found.detail:
            detail = statistics.median(found.detail["DETAIL"][size]) / statistics.median(found.detail["plain"][size])
            rows.append(Row(f"TORCH_DISTRIBUTED_DEBUG=DETAIL, {size} / plain", detail))
    if found.ddp_step:
        spread = ratio(found.ddp_step, "step")
        rows.append(Row("guard step, a DDP step / plain", spread.median, 1.01, quartiles=spread))
    for name, seconds in found.labels.items():
        microseconds = Spread.of([1e6 * one for one in seconds])
        what = f"a label, {name}"
        rows.append(Row(what, microseconds.median, LABEL_REACH.get(name), unit="us", quartiles=microseconds))
    return rows


def _capture_rows(found: Findings) -> list[Row]:
    rows = []
    for step_ms, (timings, parts) in found.capture.items():
        what, spread = f"NaN capture, a DDP step of {step_ms} ms and more", timings.ratios("capture", "plain")
        rows += [
            Row(f"{what} / plain", spread.median, CAPTURE_REACH, quartiles=spread),
            Row(f"{what}: plain", 1e3 * timings.spread("plain").median, unit="ms"),
            *(Row(f"{what}: {name}", microseconds, unit="us") for name, microseconds in parts.items()),
        ]
    if found.capture_memory is not None:
        rows.append(Row("NaN capture, peak memory of a capture less a step's / parameters", found.capture_memory))
    return rows


def _sentinel_rows(found: Findings) -> list[Row]:
    rows = []
    for step_ms, costs in found.sentinel.items():
        what = f"sentinel, a DDP step of {step_ms} ms and more"
        rows.append(Row(f"{what}: plain", 1e3 * costs.median("plain"), unit="ms"))
        for (layer, (times, quartiles)), reach in zip(costs.ratios().items(), SENTINEL_REACH, strict=True):
            rows.append(Row(f"{what}: {layer} / plain", times, reach, quartiles=quartiles))
    for layer, multiple in found.exam_memory.items():
        rows.append(Row(f"sentinel, peak memory of an exam of {layer} / parameters", multiple))
    return rows


def _checks_rows(found: Findings) -> list[Row]:
    if found.checks is None:
        return []
    what = "checks, a DDP step of 24 layers"
    rows = [Row(f"{what}: plain", 1e3 * Spread.of(found.checks.samples["plain"]).median, unit="ms")]
    for name in found.checks.samples:
        for to in ("plain", "bare"):
            if name not in ("plain", to):
                spread = found.checks.ratio(name, to)
                reach = CHECKS_REACH[to] if name == "together, window" else None
                rows.append(Row(f"{what}: {name} / {to}", spread.median, reach, quartiles=spread))
    for name in ("apart", "together"):
        reach = CHECKS_COLLECTIVES if name == "together" else None
        rows.append(Row(f"{what}: our collectives, {name}", found.checks.collectives[name], reach, unit=""))
    return rows


def _dump_rows(found: Findings) -> list[Row]:
    if found.dump is None:
        return []
    what = "dump, a step of a small transformer"
    rows = [Row(f"{what}: plain", 1e3 * found.dump.spread("plain").median, unit="ms")]
    for name in found.dump.seconds:
        if name != "plain":
            spread = found.dump.ratios(name, "plain")
            rows.append(Row(f"{what}: {name} / plain", spread.median, DUMP_REACH.get(name), quartiles=spread))
    for kind, until in (("L0", ""), ("L1", ""), ("mix", ""), ("mix", ", until stop"), ("mix, tensors", ", until stop")):
        spread = found.dump.ratios(f"{kind}, async{until}", f"{kind}{until}")
        rows.append(Row(f"{what}: {kind}{until}, async / sync", spread.median, DUMP_ASYNC_REACH, quartiles=spread))
    for level, timings in found.msprobe.items():
        if timings is None:
            rows.append(Row(f"{what}: {level} by msprobe, which is not installed / plain", None))
        else:
            spread = timings.ratios("msprobe", "plain")
            rows.append(Row(f"{what}: {level} by msprobe / plain", spread.median, quartiles=spread))
    return rows


def _gate(measured: Measured, reach: float | None) -> float | None:
    return reach if measured.world_size == GATED_WORLD else None


def _where(measured: Measured) -> str:
    return f"{measured.world_size} ranks, {measured.keys:,} keys"


def _against_leaves(measured: Measured) -> list[Row]:
    if not measured.against_leaves.seconds:
        return []
    reach = _gate(measured, LEAF_REACH.get(measured.keys))
    return [
        _ratio_row(
            f"{_where(measured)}: {ours}, faster than per leaf", measured.against_leaves, "espnet", ours, reach, True
        )
        for ours in ("tensors", "reduce_stats", "drop-in")
    ]


def _against_bare(measured: Measured) -> list[Row]:
    reaches = BARE_REACH.get(measured.keys, (None, None))
    return [
        _ratio_row(f"{_where(measured)}: {ours} / bare all_reduce", measured.lean, ours, "bare", _gate(measured, reach))
        for ours, reach in zip(("floats", "tensors"), reaches, strict=True)
    ]


def _alternating(measured: Measured) -> list[Row]:
    if "alternating floats" not in measured.lean.seconds:
        return []
    reach = _gate(measured, ALTERNATING_REACH)
    return [
        _ratio_row(
            f"{_where(measured)}: {kind}, alternating / same keys", measured.lean, f"alternating {kind}", kind, reach
        )
        for kind in ("floats", "tensors")
    ]


def _per_rank(measured: Measured) -> list[Row]:
    if "per rank" not in measured.lean.seconds:
        return []
    return [_ratio_row(f"{_where(measured)}: floats, per_rank / without", measured.lean, "per rank", "floats", None)]


def _new_key_rows(found: Findings) -> list[Row]:
    rows = []
    for keys, seconds in found.new_keys.items():
        milliseconds = Spread.of([1e3 * one for one in seconds])
        what = f"2 ranks, {len(seconds):,} calls, each with new keys: {keys}"
        rows.append(Row(what, milliseconds.median, unit="ms", quartiles=milliseconds))
    return rows


def _ratio_row(what: str, timings: Timings, variant: str, to: str, reach: float | None, at_least: bool = False) -> Row:
    return Row(what, timings.ratio(variant, to), reach, at_least, quartiles=timings.ratios(variant, to))


def _payload_rows(found: Findings) -> list[Row]:
    if not found.payloads:
        return []
    header, *per_count = zip(*found.payloads.values(), strict=True)
    worlds = ", ".join(found.payloads)
    rows = [
        Row(f"payload at {worlds}: how many different ones", _most_different([header, *per_count]), 1, unit=""),
        Row("payload: header (an empty dict)", max(header), unit="bytes"),
    ]
    size_of = {keys: max(sizes) for keys, sizes in zip(found.payload_keys[1:], per_count, strict=True)}
    size_of |= {one.keys: one.payload_bytes for one in found.timed if one.keys not in size_of}
    for keys, size in size_of.items():
        rows.append(Row(f"payload: a path, {keys:,} keys", (size - max(header)) / keys, PATH_BYTES, unit="bytes"))
    return rows


def _most_different(samples: Iterable[Sequence[int]]) -> int:
    return max(len(set(sample)) for sample in samples)


def _memory_rows(found: Findings) -> list[Row]:
    if found.memory is None:
        return []
    keys, used = found.memory
    steady = used.steady_peak_bytes + used.steady_torch_bytes
    parts: Mapping[str, tuple[int, float | None]] = {
        "first call, peak beside the result": (used.first_peak_bytes, FIRST_BYTES),
        "steady call, peak beside the result": (steady, STEADY_BYTES),
        "of which torch's temporaries": (used.steady_torch_bytes, None),
        "kept between calls": (used.retained_bytes, None),
        "the result itself": (used.result_bytes, None),
    }
    return [
        Row(f"memory a path, {keys:,} floats: {what}", size / keys, reach, unit="bytes")
        for what, (size, reach) in parts.items()
    ]


def _import_rows(found: Findings) -> list[Row]:
    if found.imported is None:
        return []
    cost = found.imported
    return [
        Row(
            "import ddpstats, beyond a bare interpreter",
            cost.with_import_ms.median - cost.bare_ms.median,
            IMPORT_MS,
            unit="ms",
        ),
        Row("import ddpstats: loads torch", float(cost.loads_torch), 0, unit=""),
    ]


# -- text -------------------------------------------------------------------------------------------------------------


def table(rows: Iterable[Row]) -> str:
    return aligned([("what", "reach", "measured", "quartiles", ""), *(row.cells() for row in rows)])


def times_table(found: Findings) -> str:
    """Median microseconds per call, of each loop."""
    lines: list[tuple[str, ...]] = [
        ("microseconds per call, median", "bare", "floats", "tensors", "drop-in", "per leaf", "rounds")
    ]
    for measured in found.timed:
        cells = [_micro(measured.lean, name) for name in ("bare", "floats", "tensors")]
        cells += [_micro(measured.against_leaves, name) for name in ("drop-in", "espnet")]
        lines.append((_where(measured), *cells, str(measured.lean.spread("bare").count)))
    return aligned(lines)


def aligned(lines: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    return "\n".join(text.rstrip() for text in [texts[0], "-" * max(map(len, texts)), *texts[1:]])


def _micro(timings: Timings, variant: str) -> str:
    return f"{1e6 * timings.spread(variant).median:,.0f}" if variant in timings.seconds else ""


def _number(value: float) -> str:
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 100 else f"{value:,.0f}"

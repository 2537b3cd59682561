"""Give changed bytes to each reader of foreign bytes, and print what it raised that it should not raise.

    python scripts/fuzz.py wire --minutes 10 --seed 1
    python scripts/fuzz.py all --minutes 10          # one target after another

The targets are in `tests/fuzz/targets.py`. With atheris (``pip install atheris``) coverage guides what is tried next;
without it the seeds are changed by chance, which finds less. Each finding is printed with its input, in the form that
``tests/fuzz/found.txt`` keeps: put it there, so that `tests/fuzz/test_fuzz.py` tries it for ever. A case that takes
longer than 10 s of the processor, or more than 2 GB of memory, is a finding, too. The exit status is 1 where there was
a finding.
"""

from __future__ import annotations

import argparse
import base64
import importlib.util
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT_SEC, LIMIT_MB = 10, 2048
LONGEST_BYTES = 1 << 16
MEMORY = Path("/dev/shm")  # a disk would be the slowest part
ODD = (b"9" * 400, b"[" * 2000, b"NaN", b"-1", b"1e999", b"../../x", b"\x1b[2J")
INSTRUMENTED = ["ddpstats", "json", "zipfile", "pickletools"]

sys.path.insert(0, str(ROOT))


def shown(target: str, data: bytes, what: str) -> str:
    """A line of ``found.txt``."""
    return f"{target} {base64.b64encode(data).decode()}  # {what}"


# -- with coverage -----------------------------------------------------------------------------------------------------


def guided(name: str, seconds: float, seed: int) -> int:
    """libFuzzer in a process of its own: it ends the process. Returns 1 for a finding."""
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=MEMORY if MEMORY.is_dir() else None) as directory:
        corpus, found = Path(directory, "corpus"), Path(directory, "found-")
        corpus.mkdir()
        options = [f"-max_total_time={int(seconds)}", f"-seed={seed}", "-print_final_stats=1"]
        options.append(f"-timeout={6 * LIMIT_SEC}")  # of the clock: the machine may be busy
        options += [f"-rss_limit_mb={LIMIT_MB}", f"-max_len={LONGEST_BYTES}", f"-artifact_prefix={found}", str(corpus)]
        command, env = [sys.executable, __file__, name, "--inside", *options], {**os.environ, "TMPDIR": directory}
        done = subprocess.run(command, check=False, cwd=ROOT, env=env, timeout=seconds + 600)
        for path in sorted(Path(directory).glob("found-*")):
            print(shown(name, path.read_bytes(), path.name.partition("-")[2].partition("-")[0]))
        return int(done.returncode != 0)


def inside(name: str, options: Sequence[str]) -> None:
    """The process that libFuzzer drives."""
    import atheris

    with atheris.instrument_imports(include=INSTRUMENTED, enable_loader_override=False):
        from tests.fuzz import targets
    target = targets.TARGETS[name]
    for place, seed in enumerate(target.seeds()):
        Path(options[-1], f"seed-{place}").write_bytes(seed)
    atheris.Setup([sys.argv[0], *options], target.run)
    atheris.Fuzz()


# -- without -----------------------------------------------------------------------------------------------------------


def changed(rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    """A seed with some faults: bytes flipped, cut out, put in twice, or numbers made huge."""
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        at = rng.randrange(1, len(data)) if len(data) > 1 else 0
        how, length = rng.randrange(6), rng.choice((1, 2, 4, 8, 64))
        if how == 0:
            data[at : at + 1] = bytes([rng.randrange(256)])
        elif how == 1:
            del data[at : at + length]
        elif how == 2:
            data[at:at] = data[at : at + length] * rng.choice((1, 2, 100))
        elif how == 3:
            data[at : at + length] = rng.choice(
                (b"\xff" * length, b"\0" * length, b"9" * 400, b"[" * 2000, b"NaN", b"-1")
            )
        elif how == 4:
            other = rng.choice(seeds)
            data[at : at + length] = other[rng.randrange(len(other)) :][:length]
        else:
            del data[at:]
    return bytes(data[:LONGEST_BYTES])


def by_chance(name: str, seconds: float, seed: int, most: int | None = None) -> int:
    """How many of the cases are findings, which are printed. ``most``: so many cases at most."""
    from tests.fuzz import targets

    target, rng, findings, count = targets.TARGETS[name], random.Random(seed), 0, 0
    seeds, ends, before_kb = target.seeds(), time.monotonic() + seconds, _most_kb()
    while time.monotonic() < ends and (most is None or count < most):
        data, began = changed(rng, seeds), time.process_time()
        count += 1
        problem = ""
        try:
            target.run(data)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        if time.process_time() - began > LIMIT_SEC:
            problem = problem or f"{time.process_time() - began:.0f} s"
        if _most_kb() > before_kb + (LIMIT_MB << 10):
            print(shown(name, data, "memory"))
            return findings + 1  # it stays so high, and would be found again and again
        if problem:
            findings += 1
            print(shown(name, data, problem[:100].replace("\n", " ")))
    print(f"{name}: {count} cases, {findings} findings, seed {seed}")
    return findings


def _most_kb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=["wire", "bundle", "dump", "record", "config", "all"])
    parser.add_argument("--minutes", type=float, default=10.0, help="for each target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--by-chance", action="store_true", help="without coverage, also where atheris is installed")
    parser.add_argument("--inside", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if args.inside is not None:
        inside(args.target, args.inside)
        return 0
    names = ["wire", "bundle", "dump", "record", "config"] if args.target == "all" else [args.target]
    run = by_chance if args.by_chance or importlib.util.find_spec("atheris") is None else guided
    findings = [run(name, 60 * args.minutes, args.seed) for name in names]
    return int(any(findings))


if __name__ == "__main__":
    raise SystemExit(main())

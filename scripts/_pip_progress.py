"""What pip writes, told in a few lines: packages, large downloads, and a sign of life. For scripts/launch.sh.

Reads pip's output from stdin, and writes lines for a terminal and a log alike, none where there was nothing to do. Ends
when pip does. If the last line says that pip failed, everything it had written follows.

usage: { pip install ... 2>&1 || echo "pip ended with $?"; } | _pip_progress.py SECONDS_SINCE_THE_START HEADING
"""

from __future__ import annotations

import os
import re
import select
import sys
import time

QUIET_SEC = 20  # after so long without a word, a line says that it goes on
_LARGE_MB = 20.0
_SIZED = re.compile(r"(?:Downloading|Using cached) (\S+?)-(\d[^-\s]*)-\S+ \((\d+(?:\.\d+)?) (MB|GB)\)")


class Progress:
    """One run of pip, line by line."""

    def __init__(self, begun_sec: float, heading: str, now: float) -> None:
        self._start = now - begun_sec
        self._heading = heading
        self._said = now
        self._packages = 0
        self._doing = "looking for packages"
        self.failed = False

    def line(self, text: str, now: float) -> str | None:
        """What to say after a line of pip's; None for nothing."""
        words = text.split()
        if text.startswith("pip ended with "):
            self.failed = True
        elif text.startswith(("Collecting ", "Obtaining ")):
            self._packages += 1
            self._doing = f"{_packages(self._packages)} found so far, now {words[1]}"
        elif sized := _SIZED.match(text.strip()):
            name, version, size, unit = sized.groups()
            if unit == "GB" or float(size) >= _LARGE_MB:
                how = "from pip's cache" if text.strip().startswith("Using") else "downloading"
                self._doing = f"{name} {version}"
                return self._say(f"{how}: {name} {version} ({size} {unit})", now)
        elif text.startswith("Installing collected packages: "):
            count = len(words) - 3
            self._doing = f"installing {_packages(count)}"
            return self._say(self._doing, now)
        return None

    def idle(self, now: float) -> str | None:
        """What to say when nothing has come: a sign of life, now and then."""
        return self._say(f"still at it: {self._doing}", now) if now - self._said >= QUIET_SEC else None

    def _say(self, text: str, now: float) -> str:
        self._said, heading, self._heading = now, self._heading, ""
        lines = [f"  {text}"] if not heading else [heading, f"  {text}"]
        return "\n".join(f"launch.sh: {now - self._start:4.0f} s  {line}" for line in lines)


def _packages(count: int) -> str:
    return f"{count} package{'s' if count > 1 else ''}"


def main() -> None:
    begun_sec, heading = sys.argv[1:]
    progress, whole, rest = Progress(float(begun_sec), heading, time.monotonic()), b"", b""
    while True:
        ready, _, _ = select.select([0], [], [], 1.0)
        chunk = os.read(0, 1 << 16) if ready else b""
        if ready and not chunk:
            break
        whole += chunk
        *lines, rest = (rest + chunk).split(b"\n")
        now = time.monotonic()
        for said in [*(progress.line(line.decode("utf-8", "replace"), now) for line in lines), progress.idle(now)]:
            if said is not None:
                print(said, flush=True)
    if progress.failed:
        sys.stdout.write(whole.decode("utf-8", "replace"))


if __name__ == "__main__":
    main()

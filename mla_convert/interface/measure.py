"""Measure a stage of work: seconds and peak resident memory."""

import logging
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stage:
    """What one stage took; `peak_rss` in bytes."""

    name: str
    seconds: float
    peak_rss: int


_open_peaks: list[int] = []  # per stage that is running, outermost first: its peak before the last reset


@contextmanager
def stage(name: str, done: list[Stage]) -> Iterator[None]:
    """Run the block as a stage and append what it took to `done`; a block that raises is not recorded.

    Stages may be nested: the peak of the outer one covers those in it.
    """
    logger.info("%s ...", name)
    _forget_peak()
    _open_peaks.append(0)
    start = time.perf_counter()
    try:
        yield
        seconds = time.perf_counter() - start
    finally:
        peak = max(_open_peaks.pop(), peak_rss())
    done.append(Stage(name, seconds, peak))
    logger.info("%s: %.1f s, peak memory %.2f GiB", name, seconds, peak / 2**30)


class Clock:
    """Adds up the seconds of all the blocks entered with it: a stage whose work is spread among another's."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *exc: object) -> None:
        self.seconds += time.perf_counter() - self._start


def peak_rss() -> int:
    """Peak resident memory in bytes: since the last stage began on Linux, since the process did elsewhere."""
    with suppress(OSError, ValueError, StopIteration):
        status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return 1024 * int(next(line for line in status if line.startswith("VmHWM:")).split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes everywhere but on macOS


def _forget_peak() -> None:
    peak = peak_rss()
    _open_peaks[:] = [max(before, peak) for before in _open_peaks]
    # Linux: writing 5 resets the high-water mark to the present size. Elsewhere the peak only grows.
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

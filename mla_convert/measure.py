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


@contextmanager
def stage(name: str, done: list[Stage]) -> Iterator[None]:
    """Run the block as a stage and append what it took to `done`; a block that raises is not recorded."""
    logger.info("%s ...", name)
    _forget_peak()
    start = time.perf_counter()
    yield
    done.append(Stage(name, time.perf_counter() - start, peak_rss()))
    logger.info("%s: %.1f s, peak memory %.2f GiB", name, done[-1].seconds, done[-1].peak_rss / 2**30)


def peak_rss() -> int:
    """Peak resident memory in bytes: of this stage on Linux, of the process so far elsewhere."""
    with suppress(OSError, ValueError, StopIteration):
        status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return 1024 * int(next(line for line in status if line.startswith("VmHWM:")).split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes everywhere but on macOS


def _forget_peak() -> None:
    # Linux: writing 5 resets the high-water mark to the present size. Elsewhere the peak only grows.
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

"""What every picture has in common: no display, thin grid, two spines, one way to a file."""

from pathlib import Path
from typing import IO, Any


def new(width: float = 8, height: float = 5, columns: int = 1) -> tuple[Any, Any]:
    """A figure of `width` x `height` inches and its axes (an array of them with several columns)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, columns, figsize=(width, height), dpi=150, layout="constrained", squeeze=False)
    for each in axes[0]:
        each.grid(alpha=0.25)
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes[0, 0] if columns == 1 else axes[0]


def plain(name: str) -> str:
    """`name` as a label that shows it: no mathematics between dollars, and not left out of legends for a leading _."""
    return (" " if name.startswith("_") else "") + name.replace("$", r"\$")


def save(figure: Any, target: str | Path | IO[str], **options: Any) -> None:
    """Write `figure` to a file, in the format of its suffix, or to a stream, with savefig's `options`; free it."""
    from matplotlib import pyplot as plt

    figure.savefig(Path(target).expanduser() if isinstance(target, str | Path) else target, **options)
    plt.close(figure)

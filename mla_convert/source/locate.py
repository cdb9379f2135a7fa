"""Where a checkpoint lies, in the words from_pretrained wants. Imports neither torch nor transformers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mla_convert.errors import BadCheckpoint

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def locate(source: str | Path) -> tuple[str, dict[str, Any]]:
    """What from_pretrained wants: the folder or hub id, and {"gguf_file": name} where the weights are GGUF.

    Raises BadCheckpoint when `source` is no folder, no .gguf file and no possible hub id, or holds several
    .gguf files.
    """
    path = Path(source).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise BadCheckpoint(f"{source}: a file, but not .gguf; name the folder of the checkpoint")
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir():
        ggufs = sorted(path.glob("*.gguf"))
        if ggufs and not any(path.glob("*.safetensors")):
            if len(ggufs) > 1:
                raise BadCheckpoint(f"{source}: {len(ggufs)} .gguf files; name one of them, e.g. {ggufs[0]}")
            return str(path), {"gguf_file": ggufs[0].name}
        return str(path), {}
    if not _HUB_ID.fullmatch(str(source)):
        raise BadCheckpoint(f"{source}: no such folder or file, and no hub id (owner/name); check the path")
    return str(source), {}

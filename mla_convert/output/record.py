"""conversion.json of a converted folder, read back."""

import json
from pathlib import Path
from typing import Any

from mla_convert.errors import BadCheckpoint
from mla_convert.output.write import RECORD
from mla_convert.source.checkpoint import Checkpoint


def read_record(folder: str | Path, needed: tuple[str, ...] = (), source: str | Path = "") -> dict[str, Any]:
    """The record of `folder`. Raises BadCheckpoint when it is missing, damaged, or lacks its source or a needed key.

    source: the other argument of the command, in case the two were swapped.
    """
    place = Path(folder).expanduser()
    if not place.is_dir():
        raise BadCheckpoint(f"{folder} does not exist or is no folder; name a folder that `mla-convert convert` wrote")
    path = place / RECORD
    if not path.is_file():
        if source and (Path(source).expanduser() / RECORD).is_file():
            raise BadCheckpoint(f"{folder}: no {RECORD}, but {source} has one: name SOURCE first, then CONVERTED")
        raise BadCheckpoint(f"{folder}: no {RECORD}; name a folder that `mla-convert convert` wrote")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadCheckpoint(f"{path} is not JSON ({error}); convert again") from error
    if not isinstance(record, dict):
        raise BadCheckpoint(f"{path} holds a {type(record).__name__}, not an object; convert again")
    missing = [key for key in ("source", *needed) if key not in record]
    if missing or not isinstance(record["source"], dict):
        raise BadCheckpoint(f"{path} lacks {', '.join(missing) or 'its source object'}; convert again")
    return record


def check_source(folder: str, record: dict[str, Any], source: Checkpoint) -> None:
    """Raise BadCheckpoint unless `record` says that `folder` was converted from exactly these weight files."""
    hashes, recorded = source.hashes(), record["source"].get("hashes", {})
    if hashes == recorded:
        return
    name = min(n for n in hashes | recorded if hashes.get(n) != recorded.get(n))
    raise BadCheckpoint(
        f"{folder} was converted from other weights, it was not converted from {source.path}: {name} has sha256 "
        f"{str(hashes.get(name))[:12]}, conversion.json says {str(recorded.get(name))[:12]}; name its own source"
    )

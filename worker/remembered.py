"""The members that a peer has known, in its folder, for when it is started again.

They are addresses to try where those that the user names are away. Nothing else is believed of
them: who answers there has to show that it is of the run.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from murmuration.protos.addresses import split_address, split_relayed
from murmuration.protos.files import read_json, write_atomically

_MEMBERS = "members.json"
_MOST, _LONGEST, _MOST_BYTES = 32, 300, 32 * 1024


@dataclass(frozen=True)
class Remembered:
    """Args:
    run: of which they were members.
    contacts: what the user had named then.
    members: `HOST:PORT` of each that could be dialled, those first that were alive.
    """

    run: int = 0
    contacts: tuple[str, ...] = ()
    members: tuple[str, ...] = ()

    def keep(self, folder: Path) -> None:
        """Raises OSError."""
        document = {
            "run": f"{self.run:016x}",
            "contacts": self.contacts[:_MOST],
            "members": [each for each in self.members if split_relayed(each) is None][:_MOST],
        }
        write_atomically(folder / _MEMBERS, json.dumps(document, indent=1).encode())


NOTHING = Remembered()


def remembered(
    folder: Path | None, contacts: Sequence[str], tell: Callable[[str], None]
) -> Remembered:
    """Reads what a peer knows that goes on in this folder; nothing where the user names others by
    now. Args: tell: takes a line where what is there cannot be read."""
    if folder is None or not (path := folder / _MEMBERS).exists():
        return NOTHING
    try:
        found = _read(read_json(path, _MOST_BYTES))
    except (OSError, ValueError):
        tell(f"{path} is damaged or cannot be read: its members of the run are not tried")
        return NOTHING
    same = set(contacts) & {*found.contacts, *found.members} or not {*contacts, *found.contacts}
    return found if same else NOTHING


def _read(document: Any) -> Remembered:
    """Raises ValueError."""
    if not isinstance(document, dict):
        raise ValueError("no document")
    lists = [document.get(key) for key in ("contacts", "members")]
    contacts, members = (tuple(_addresses(each)) for each in lists)
    return Remembered(int(str(document.get("run")), 16), contacts, members)


def _addresses(given: object) -> list[str]:
    """Raises ValueError."""
    if not isinstance(given, list) or len(given) > _MOST:
        raise ValueError("no list of addresses")
    for each in given:
        if not isinstance(each, str) or len(each) > _LONGEST:
            raise ValueError("no address")
        split_address(each)
    return given

"""Where the values of a configuration come from, for the lines that refuse one."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Source:
    """Args:
    name: of the file, or of whatever else the values are from.
    written: (section, key) of each value in that file.
    typed: by (section, key), the flag and value of what the command line said on top.
    """

    name: str
    written: frozenset[tuple[str, str]] = frozenset()
    typed: Mapping[tuple[str, str], str] = field(default_factory=dict)

    def of(self, section: str, keys: Iterable[str]) -> str:
        """Who has said these: the file, flags as typed, or both."""
        places = [(section, key) for key in keys]
        flags = dict.fromkeys(self.typed[place] for place in places if place in self.typed)
        names = [] if flags and self.written.isdisjoint(places) else [self.name]
        return " and ".join([*names, *flags])

    def of_named(self, section: str, said: str, otherwise: str = "") -> str:
        """Who has said the keys that an error names somewhere; that key, if it is none of them."""
        known = {key for part, key in (*self.written, *self.typed) if part == section}
        return self.of(section, sorted(known.intersection(re.findall(r"\w+", said))) or [otherwise])

    def of_error(self, section: str, keys: Iterable[str], said: str) -> str:
        """Who has said what is wrong: the flag of the key that the error begins with, else all."""
        first = said.split(maxsplit=1)[0]
        return self.of(section, [first] if (section, first) in self.typed else keys)

"""Runs a worker of `murmur swarm` in the network namespace that is kept for it.

The environment has, by the worker's name, the address to listen on and the prefix of its commands.
"""

import json
import os
import sys

PLACES = "MURMUR_LAB_PLACES"


def main() -> None:
    places, words = json.loads(os.environ[PLACES]), sys.argv[1:]
    name = words[words.index("--name") + 1]
    own, *prefix = places[name]
    others = (address for other, (address, *_) in places.items() if other != name)  # as they join
    for at, word in enumerate(words[:-1]):
        if word == "--listen":
            words[at + 1] = own
        elif word == "--join":
            words[at + 1] = next(others)
    os.execvp(prefix[0], [*prefix, *words])


if __name__ == "__main__":
    main()

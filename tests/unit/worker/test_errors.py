import re
from collections.abc import Iterator

import murmuration
from murmuration.worker import errors
from murmuration.worker.errors import MurmurError

DRAWN = re.compile(r"^    ( *)([A-Z]\w+) +(\d+) ", re.MULTILINE)


def tree(kind: type[MurmurError], depth: int = 0) -> Iterator[tuple[int, str, int]]:
    yield depth, kind.__name__, int(kind.exit_code)
    for below in kind.__subclasses__():
        yield from tree(below, depth + 1)


def test_the_tree_of_errors_is_the_one_that_is_drawn_with_its_exit_codes():
    assert all(hasattr(murmuration, name) for name in murmuration.__all__)  # loaded by that
    drawn = [
        (len(space) // 4, name, int(code)) for space, name, code in DRAWN.findall(errors.__doc__)
    ]
    assert sorted(drawn) == sorted(tree(MurmurError))


def test_every_error_that_a_loop_may_meet_is_a_name_of_the_library():
    inner = {"Unreachable", "Untrusted", "Refused", "Busy"}
    assert {name for _, name, _ in tree(MurmurError)} - inner <= set(murmuration.__all__)

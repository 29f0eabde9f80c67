"""How much callers may have under way at once."""

from contextlib import ExitStack

import pytest

from murmuration.worker.node.answers import STREAMS_EACH, most_streams
from murmuration.worker.transport import Busy, Caller, Places

ANNA, BEN = (Caller(f"ipv4:10.0.0.{n}:1", "peer", name) for n, name in enumerate(("anna", "ben")))
SOMEBODY = Caller("ipv4:10.0.0.9:1")


def test_each_caller_has_its_own_places_and_all_have_so_many():
    places = Places("streams", 0, 2, lambda: 6)
    with ExitStack() as held:
        for caller in (ANNA, ANNA):
            held.enter_context(places.taken(caller))
        with pytest.raises(Busy, match="anna has 2 streams here, and may have no more"):
            held.enter_context(places.taken(ANNA))
        held.enter_context(places.taken(BEN))
        with pytest.raises(Busy, match="of at most 6 streams are under way"):
            held.enter_context(places.taken(BEN))
    with places.taken(ANNA), places.taken(BEN):
        pass


@pytest.mark.parametrize(
    ("share", "places", "callers"),
    [(3, 4, (ANNA, ANNA, ANNA, BEN)), (1, 3, (SOMEBODY, SOMEBODY, SOMEBODY))],
    ids=["whatever others have", "without certificates none is told from another"],
)
def test_each_caller_has_its_share(share, places, callers):
    taken = Places("streams", 1, share, lambda: places)
    with ExitStack() as held:
        for caller in callers:
            held.enter_context(taken.taken(caller))
        with pytest.raises(Busy, match=f"of at most {places} streams are under way"):
            held.enter_context(taken.taken(callers[-1]))


def test_places_grow_with_the_swarm_and_no_caller_has_most_of_them():
    assert most_streams(1) == most_streams(8) == 128
    assert most_streams(50) == 800
    assert most_streams(1) / 4 >= STREAMS_EACH

"""Who meets whom in a round of small groups, as membership is now."""

from functools import lru_cache

from algorithms.grouping import group_of, membership_epoch
from worker.exchange.context import Context
from worker.exchange.types import View


def members(context: Context, view: View, fragment: int) -> frozenset[str]:
    """Whom the groups of the fragment's rounds are drawn from."""
    return view.in_draw(fragment) | {context.me}


def group(context: Context, view: View, fragment: int, round_: int) -> tuple[str, ...]:
    """This peer's group of the round; itself alone if it sits out. Who comes so late that others of
    its group have ended the run does without those."""
    peers = members(context, view, fragment)
    size, unreachable = context.plan.group_size, view.unreachable
    drawn = _drawn(context.me, context.run, fragment, round_, peers, size, unreachable)
    return tuple(peer for peer in drawn if not view.has_ended_before(peer, fragment, round_))


@lru_cache(maxsize=256)  # asked again whenever anything has changed
def _drawn(
    me: str,
    run: int,
    fragment: int,
    round_: int,
    peers: frozenset[str],
    size: int,
    unreachable: frozenset[tuple[str, str]],
) -> tuple[str, ...]:
    epoch = membership_epoch(peers)
    return group_of(me, run, fragment, round_, epoch, peers, size, unreachable) or (me,)

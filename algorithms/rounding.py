"""Seeds of stochastic rounding: what is rounded names its own noise, on whichever peer."""

from hashlib import blake2b


def contribution_seed(peer: str, fragment: int, round_: int, start: int) -> int:
    """For a peer's contribution of the shard that starts at value `start` of the fragment."""
    return _seed("contribution", peer, fragment, round_, start)


def reduction_seed(fragment: int, round_: int, start: int) -> int:
    """For the reduction of that shard, whoever reduces it."""
    return _seed("reduction", "", fragment, round_, start)


def _seed(kind: str, peer: str, *numbers: int) -> int:
    """63 bits."""
    text = "/".join((kind, peer, *map(str, numbers)))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1

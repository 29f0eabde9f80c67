"""What the machine of membership is told, and what it wants done."""

from dataclasses import dataclass

from worker.membership.member import Digest, Member, Phase

# ------------------------------------------------------------------------------------- events


@dataclass(frozen=True)
class ProbeTick:
    """Time passes; expected a few times per `gossip_s`."""


@dataclass(frozen=True)
class Gossiped:
    """Members arrived with gossip or a join; `sender` is the peer that sent them, if known."""

    members: tuple[Member, ...]
    sender: str | None = None


@dataclass(frozen=True)
class Probed:
    """A `Probe` has ended."""

    peer: str
    answered: bool


@dataclass(frozen=True)
class IndirectlyProbed:
    """An `IndirectProbe` has ended; `alive` is False as well when the asked peer did not answer."""

    peer: str
    alive: bool


@dataclass(frozen=True)
class Suspected:
    """A data stream to the peer broke: probe it now."""

    peer: str


@dataclass(frozen=True)
class WaitedInVain:
    """A round of this peer has waited for the other's part, which never came."""

    peer: str


@dataclass(frozen=True)
class Updated:
    """This peer's own state has changed."""

    phase: Phase
    step: int
    digests: tuple[Digest, ...]
    step_s: float = 0.0


@dataclass(frozen=True)
class Measured:
    """This peer has new measurements of its links and its stage."""

    profile: bytes


@dataclass(frozen=True)
class Moved:
    """Others reach this peer at another address from now on."""

    address: str


@dataclass(frozen=True)
class Expelled:
    """The run's authority has taken a peer's certificate back."""

    peer: str


@dataclass(frozen=True)
class Leaving:
    """This peer goes away on purpose."""


Event = (
    ProbeTick
    | Gossiped
    | Probed
    | IndirectlyProbed
    | Suspected
    | WaitedInVain
    | Updated
    | Measured
    | Moved
    | Expelled
    | Leaving
)

# ------------------------------------------------------------------------------------ actions


@dataclass(frozen=True)
class Probe:
    """Exchange news of members with a peer; report `Probed`, and `Gossiped` with its answer."""

    peer: str
    address: str
    timeout_s: float


@dataclass(frozen=True)
class IndirectProbe:
    """Ask the peer at `via` to probe another; report `IndirectlyProbed`."""

    via: str
    peer: str
    address: str
    timeout_s: float


@dataclass(frozen=True)
class ViewChanged:
    """A peer's health, phase or unreachable peers changed, or the set of peers did."""


Action = Probe | IndirectProbe | ViewChanged

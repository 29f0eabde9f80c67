"""What two partners of a pair round say to each other, and what each of them holds of the other.

Between every two peers of a group there is one stream, called by the one whose name comes first.
Each side begins with a `PairHeader` that says what it holds already of the other's parts. Then each
gives its anchor and, when that is due, its contribution: a `PartHeader` and the bytes from where an
earlier stream has left off. Its last word is `PairStaged`, or a `Refusal`. There is no I/O, clock
or tensor here: what a part is made of is an opaque handle of the adapter that carries it.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from worker.exchange.pairwise.round import PairRound
from worker.exchange.types import Failed, RoundConfig, Succeeded, Suspect

ANCHOR, CONTRIBUTION = PARTS = (0, 1)  # on the wire: PartHeader.part

Group = tuple[str, ...]


class RefusalKind(StrEnum):
    """Why a stream is refused."""

    RUN = "run"  # another run
    GROUP = "group"  # another group
    PRUNED = "pruned"  # the round is over here, or given up
    AGAIN = "again"  # trying again helps
    INVALID = "invalid"  # it does not fit


# ----------------------------------------------------------------------------------- settings


@dataclass(frozen=True)
class PartForm:
    """How a part is encoded."""

    codec: int
    name: str
    total_bytes: int


@dataclass(frozen=True, kw_only=True)
class PairSettings:
    """Args:
    me, run: this peer and the run's id.
    forms: by fragment and part, how it travels.
    rounds: by fragment, how many the run has.
    config: when rounds are given up.
    group_size: 2 is a pair.
    group_key: how a header names a group.
    anchors_told, anchors_awaited: whether the train side uses anchors that come ahead, and waits.
    """

    me: str
    run: int
    forms: Sequence[tuple[PartForm, PartForm]]
    rounds: Sequence[int]
    config: RoundConfig
    group_size: int = 2
    group_key: Callable[[Group], object] = lambda group: group
    anchors_told: bool = False
    anchors_awaited: bool = False


# ----------------------------------------------------------------------------------- messages


@dataclass(frozen=True, kw_only=True)
class PairHeader:
    """The first message of either side.

    `group` names the group as `PairSettings.group_key` has it. `held` is, by part, the hash of what
    is here of the other's and how many bytes of it.
    """

    run: int
    fragment: int
    round: int
    sender: str
    group: object
    held: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, kw_only=True)
class PartHeader:
    """A part follows, in bytes from `offset` on."""

    part: int
    codec: int
    total_bytes: int
    hash: int
    offset: int
    weight: int


@dataclass(frozen=True)
class PairStaged:
    """Everything that this peer needs of its partners is here."""


@dataclass(frozen=True)
class Refusal:
    """This stream, or this round, is not to be."""

    kind: RefusalKind
    reason: str


# --------------------------------------------------------------- what else happens on a stream


@dataclass(frozen=True)
class PartProgress:
    """This many bytes of the part that is arriving are here, in all."""

    received_bytes: int


@dataclass(frozen=True)
class PartValid:
    """A part that `CheckPart` named is what it should be."""

    part: "PairPart"


@dataclass(frozen=True)
class Unfit:
    """What came cannot be used; nothing is kept of `part`."""

    again: bool
    reason: str
    part: "PairPart | None" = None


@dataclass(frozen=True)
class StreamClosed:
    """Nothing more comes: the other side has ended the stream, or it broke off for this reason."""

    reason: str | None


Message = PairHeader | PartHeader | PairStaged | Refusal
StreamEvent = Message | PartProgress | PartValid | Unfit | StreamClosed


# ----------------------------------------------------------------------------------- buffers


@dataclass(eq=False)
class PairPart:
    """An anchor or a contribution, this peer's own or as much of a partner's as is here.

    Args:
        hash: of all of it.
        values: what it is made of; opaque.
    """

    hash: int
    total_bytes: int
    weight: int = 1
    received: int = 0  # bytes
    checked: bool = False
    values: object = None

    @property
    def complete(self) -> bool:
        return self.received >= self.total_bytes


@dataclass(eq=False)
class PairStream:
    """One stream to a partner, from this peer's side.

    Args:
        buffer: the round that it belongs to; None until the partner is admitted.
        attempt: of the caller's; 0 on a stream that was accepted.
        calls: whether this peer has opened it.
        link: what carries it; opaque.
    """

    peer: str = ""
    buffer: "PairBuffer | None" = None
    attempt: int = 0
    calls: bool = False
    link: object = None
    held: tuple[tuple[int, int], ...] | None = None  # what the partner holds; None before it says
    said: set[int] = field(default_factory=set)  # parts
    last_said: bool = False
    drained: bool = False  # all has been said that matters: only the end is missing
    heard_all: bool = False  # the partner has ended its side, after its last word
    over: bool = False
    arriving: PairPart | None = None
    arriving_index: int = ANCHOR
    arriving_since: float = 0.0
    here_before: int = 0
    checking: set[PairPart] = field(default_factory=set)
    header_by: float = 0.0  # an accepted stream without a header ends then

    def offset(self, own: PairPart) -> int:
        """From where the partner needs this part."""
        return next((offset for hash_, offset in self.held or () if hash_ == own.hash), 0)


@dataclass(eq=False)
class PairBuffer:
    """One round as one of its peers sees it.

    Args:
        group: the peers of the round, this one included.
        own: by part, what this peer gives; the contribution comes when the round has begun.
        laid: when (s) the buffer was laid out.
    """

    fragment: int
    round: int
    group: Group
    own: dict[int, PairPart]
    laid: float
    theirs: defaultdict[str, dict[int, PairPart]] = field(default_factory=lambda: defaultdict(dict))
    staged: set[str] = field(default_factory=set)  # partners that hold everything
    declined: dict[str, str] = field(default_factory=dict)  # partners that have given up, and why
    complete: bool = False  # everything is here
    machine: PairRound | None = None  # from the beginning of the round
    began: float = 0.0
    succeeded: bool = False
    failed: str = ""  # why
    leave_at: float | None = None  # when a round that is given up is left
    last: str = ""  # whose values came last
    heard: float = 0.0  # when bytes of a partner came last
    told: bool = False  # whether the train side has the anchors' mean, or is about to
    let_go: bool = False  # whether it knows that it need not wait for that
    streams: dict[str, PairStream] = field(default_factory=dict)
    recalls: dict[str, tuple[float, int]] = field(default_factory=dict)  # when, which attempt

    @property
    def key(self) -> tuple[int, int]:
        return self.fragment, self.round

    @property
    def name(self) -> str:
        return f"round {self.round} of fragment {self.fragment}"

    @property
    def ended(self) -> bool:
        return self.succeeded or bool(self.failed)

    @property
    def weight(self) -> int:
        """Of this peer's contribution."""
        contribution = self.own.get(CONTRIBUTION)
        return contribution.weight if contribution else 1

    def header(self, settings: PairSettings, peer: str) -> PairHeader:
        """This peer's first message to the partner."""
        parts = (self.theirs[peer].get(part) for part in PARTS)
        return PairHeader(
            run=settings.run,
            fragment=self.fragment,
            round=self.round,
            sender=settings.me,
            group=settings.group_key(self.group),
            held=tuple((part.hash, part.received) if part else (0, 0) for part in parts),
        )

    def drop(self, stream: PairStream, part: PairPart) -> None:
        """Nothing of a part that the stream has brought is kept."""
        parts = self.theirs[stream.peer]
        for index in [index for index, each in parts.items() if each is part]:
            del parts[index]
        if stream.arriving is part:
            stream.arriving = None

    def received(self, peer: str) -> bool:
        """Whether all of the partner's values are here, and valid."""
        parts = self.theirs[peer]
        return all(part in parts and parts[part].checked for part in PARTS)

    def holds_anchors(self, me: str) -> bool:
        """Whether every partner's anchor is here, and valid."""
        anchors = (self.theirs[peer].get(ANCHOR) for peer in self.group if peer != me)
        return all(anchor is not None and anchor.checked for anchor in anchors)

    def parts(self, part: int, me: str) -> list[PairPart]:
        """A part of every peer, in the order of the group, which is sorted."""
        return [self.own[part] if peer == me else self.theirs[peer][part] for peer in self.group]


# ------------------------------------------------------------------------------------ actions


@dataclass(frozen=True)
class OpenStream:
    """Call the stream's partner."""

    stream: PairStream


@dataclass(frozen=True)
class Send:
    """After all that is to be sent before. A `Refusal` overtakes what has not left, and it and
    `PairStaged` are the last words of this side."""

    stream: PairStream
    message: Message


@dataclass(frozen=True)
class SendPart:
    """Send the header, then the part's bytes from its offset on."""

    stream: PairStream
    header: PartHeader
    part: PairPart


@dataclass(frozen=True)
class EndStream:
    """End an accepted stream, once all has been sent."""

    stream: PairStream


@dataclass(frozen=True)
class DropStream:
    """End the stream at once, whatever is under way."""

    stream: PairStream


@dataclass(frozen=True)
class CheckPart:
    """Check a part that is complete; report `PartValid`, or `Unfit`."""

    stream: PairStream
    part: PairPart
    index: int  # ANCHOR or CONTRIBUTION


@dataclass(frozen=True)
class AverageAnchors:
    """Average all anchors of the buffer, then report `anchors_averaged`."""

    buffer: PairBuffer


@dataclass(frozen=True)
class TellAnchor:
    """The train side may start from this mean of the next round's anchors, or without it."""

    fragment: int
    round: int
    mean_anchor: object | None


@dataclass(frozen=True)
class RoundEnded:
    """The round is to be applied, or is given up."""

    buffer: PairBuffer
    outcome: Succeeded | Failed


@dataclass(frozen=True)
class Misfit:
    """What came from a peer did not fit: count it. `again`: it may the next time. `counted` as
    declined, not as a misfit, is a stream for another round or group."""

    sender: str
    round: int
    again: bool
    reason: str
    declined: bool = False


Action = (
    OpenStream
    | Send
    | SendPart
    | EndStream
    | DropStream
    | CheckPart
    | AverageAnchors
    | TellAnchor
    | RoundEnded
    | Misfit
    | Suspect
)

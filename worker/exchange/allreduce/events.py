"""What a mean round's machines take in, and what they ask to be done."""

from dataclasses import dataclass

from worker.exchange.allreduce.dialogue import (
    ContributionHeader,
    Group,
    ReductionHeader,
    RefusalKind,
    ShardRange,
)
from worker.exchange.types import (
    Failed,
    GivenUp,
    RoundTick,
    ShardKey,
    Succeeded,
    Suspect,
    ViewUpdated,
)

# ------------------------------------- to a contributor, of its try number `attempt` for a shard


@dataclass(frozen=True)
class ContributionResumed:
    """The reducer has this many bytes of the contribution already."""

    shard: int
    attempt: int
    offset: int


@dataclass(frozen=True)
class ContributionSent:
    """All frames of the contribution have gone out."""

    shard: int
    attempt: int


@dataclass(frozen=True)
class ContributionRedirected:
    """The asked peer sees a live peer above itself for this shard."""

    shard: int
    attempt: int
    peer: str


@dataclass(frozen=True)
class ContributionRefused:
    """The reducer does not take it."""

    shard: int
    attempt: int
    kind: RefusalKind
    reason: str


@dataclass(frozen=True)
class ReductionBegun:
    """The reduction's header is here; its frames follow, or it is `whole` here already."""

    shard: int
    attempt: int
    header: ReductionHeader
    whole: bool = False


@dataclass(frozen=True)
class ReductionBytes:
    """This many more bytes of the reduction are here."""

    shard: int
    attempt: int
    size: int


@dataclass(frozen=True)
class ReductionDecoded:
    """The reduction is whole, verified and decoded."""

    shard: int
    attempt: int


@dataclass(frozen=True)
class AnswerDamaged:
    """What came from the reducer does not fit."""

    shard: int
    attempt: int
    reason: str


@dataclass(frozen=True)
class TryBroken:
    """The stream has ended; no `reason`: the other side has ended it."""

    shard: int
    attempt: int
    reason: str = ""


ContributorEvent = (
    RoundTick
    | ViewUpdated
    | GivenUp
    | ContributionResumed
    | ContributionSent
    | ContributionRedirected
    | ContributionRefused
    | ReductionBegun
    | ReductionBytes
    | ReductionDecoded
    | AnswerDamaged
    | TryBroken
)

# ------------------------------------------------------------------- from a contributor: actions


@dataclass(frozen=True)
class OpenTry:
    """Open a stream to the peer, which may be this one, and send the header."""

    peer: str
    attempt: int
    header: ContributionHeader


@dataclass(frozen=True)
class SendContribution:
    """Send the frames of the contribution from this byte on."""

    key: ShardKey
    attempt: int
    offset: int


@dataclass(frozen=True)
class ReceiveReduction:
    """Take the frames that come; `fresh`: nothing of them is here yet."""

    key: ShardKey
    attempt: int
    header: ReductionHeader
    fresh: bool


@dataclass(frozen=True)
class DecodeReduction:
    """Verify and decode the reduction, then report `ReductionDecoded` or `AnswerDamaged`."""

    key: ShardKey
    attempt: int


@dataclass(frozen=True)
class UseReduction:
    """The decoded reduction belongs to the round's mean; this peer's reducer keeps it too."""

    key: ShardKey
    attempt: int


@dataclass(frozen=True)
class EndTry:
    """Close the stream; `taken_over`: another peer gets the shard."""

    key: ShardKey
    attempt: int
    taken_over: bool = False


ContributorAction = (
    OpenTry
    | SendContribution
    | ReceiveReduction
    | DecodeReduction
    | UseReduction
    | EndTry
    | Suspect
    | Succeeded
    | Failed
)

# ------------------------------- to a reducer; a stream is one try of one contributor, by number


@dataclass(frozen=True)
class ContributionOffered:
    """A contributor's stream begins."""

    stream: int
    header: ContributionHeader


@dataclass(frozen=True)
class OwnOffered:
    """This peer contributes to a shard that it reduces itself; the bytes are here."""

    stream: int
    key: ShardKey
    group: Group
    hash: int
    weight: int
    norm: float = 0.0


@dataclass(frozen=True)
class ContributionBytes:
    """This many more bytes are here; nothing was kept where `Reducer.takes` forbids it."""

    stream: int
    size: int


@dataclass(frozen=True)
class ContributionVerified:
    """The whole contribution has its hash, and its values can be averaged."""

    stream: int


@dataclass(frozen=True)
class ContributionDamaged:
    """What came does not fit; `again`: sending it again may help."""

    stream: int
    reason: str
    again: bool


@dataclass(frozen=True)
class ContributorDone:
    """The contributor has said that it sends nothing more."""

    stream: int


@dataclass(frozen=True)
class ContributorGone:
    """The stream has ended."""

    stream: int


@dataclass(frozen=True)
class Advanced:
    """This peer's own state of a fragment is at `version` now, and `group` lays out that round."""

    fragment: int
    version: int
    group: Group


@dataclass(frozen=True)
class ReductionLearned:
    """This peer has received the reduction of a shard from another reducer."""

    key: ShardKey


@dataclass(frozen=True)
class ShardComputed:
    """A `ComputeShard` is done, or has failed."""

    key: ShardKey
    attempt: int
    failed: bool = False


ReducerEvent = (
    RoundTick
    | ViewUpdated
    | ContributionOffered
    | OwnOffered
    | ContributionBytes
    | ContributionVerified
    | ContributionDamaged
    | ContributorDone
    | ContributorGone
    | Advanced
    | ReductionLearned
    | ShardComputed
)

# ------------------------------------------------------------------------ from a reducer: actions


@dataclass(frozen=True)
class AskToResume:
    """Tell the contributor which byte to go on from."""

    stream: int
    offset: int


@dataclass(frozen=True)
class TakeContribution:
    """Take the frames that come for this shard from this peer; `fresh`: none is here yet."""

    stream: int
    key: ShardKey
    peer: str
    fresh: bool


@dataclass(frozen=True)
class VerifyContribution:
    """All bytes are here: report `ContributionVerified` or `ContributionDamaged`."""

    stream: int
    shard: ShardRange


@dataclass(frozen=True)
class RedirectStream:
    """Tell the contributor to go to this peer, and end the stream."""

    stream: int
    peer: str


@dataclass(frozen=True)
class RefuseStream:
    """Tell the contributor why not, and end the stream; `faulty`: what it sent does not fit."""

    stream: int
    kind: RefusalKind
    reason: str
    faulty: bool = False


@dataclass(frozen=True)
class AnswerStream:
    """Give the shard's reduction from this byte on, and end the stream."""

    stream: int
    key: ShardKey
    offset: int


@dataclass(frozen=True)
class ComputeShard:
    """Average the contributions in this order, each times its factor; report `ShardComputed`.

    `left_out` are peers in quarantine, whose contributions do not count. `missing` are those that
    were waited for in vain. `alike`: groups that contribute the same, bit for bit.
    """

    key: ShardKey
    attempt: int
    shard: ShardRange
    contributors: Group
    weights: tuple[int, ...]
    factors: tuple[float, ...]
    alike: tuple[Group, ...]
    left_out: Group
    missing: Group
    next_group: Group
    last: str


@dataclass(frozen=True)
class KeepReduction:
    """The reduction just reported is the shard's."""

    key: ShardKey


@dataclass(frozen=True)
class ForgetContributions:
    """Forget what came for this shard."""

    key: ShardKey


@dataclass(frozen=True)
class ForgetShard:
    """Forget what came for this shard, and its reduction."""

    key: ShardKey


Reply = RedirectStream | RefuseStream | AnswerStream
ReducerAction = (
    AskToResume
    | TakeContribution
    | VerifyContribution
    | Reply
    | ComputeShard
    | KeepReduction
    | ForgetContributions
    | ForgetShard
)

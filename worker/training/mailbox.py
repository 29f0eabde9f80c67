"""Carries what the train thread and the I/O thread tell each other; `IOThread` is the latter.

What is large is bounded by construction: a fragment has at most one round in flight, and there is
at most one adoption on its way. Putting never blocks the train thread; it waits only in
`Mailbox.wait`, and that wait is what the report calls stall.
"""

import asyncio
import queue
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

from torch import Tensor

from murmuration.algorithms.fragment_state import FragmentState, RoundResult
from murmuration.algorithms.fragments import Ranges
from murmuration.protos.events import Log
from murmuration.worker.background import LoopThread
from murmuration.worker.leases.ledger import LeaseMessage, ShareMessage
from murmuration.worker.membership import Phase

if TYPE_CHECKING:
    from murmuration.worker.node.node import Node

NO_VALUES = memoryview(b"")
_LOOK_S = 0.5  # a signal that comes just before a wait is dealt with after it


@dataclass(frozen=True)
class Begin:
    """Exchange these values in a round."""

    fragment: int
    round: int
    group: tuple[str, ...]
    values: Tensor  # 1-D fp32, a snapshot
    # Goes along in a plan of pairs, where there are partners instead of a group.
    anchor: Tensor | None = None
    everyone: bool = False  # asks for the exact mean over all that ends a run
    weight: int = 1  # what they count in it
    leaves: bool = False  # this peer contributes before the others do, and then goes


@dataclass(frozen=True)
class Published:
    """The state that this peer has committed, for others to see and fetch."""

    phase: Phase
    step: int
    entry_step: int  # the position from which a joiner takes part in what is in flight here
    states: tuple[FragmentState, ...]
    # The fragments that this peer cannot bring forward by itself.
    failed: frozenset[int] = frozenset()
    step_s: float = 0.0  # what an inner step takes here, 0 as long as that is not known
    adopts: int = 0  # how many `Adopt` were dealt with, whether taken or not


@dataclass(frozen=True)
class TrainingEvent:
    event: dict[str, object]


@dataclass(frozen=True)
class IterationStarted:
    """The train thread begins this iteration of a stage; `gradient_norm` is that of the last."""

    iteration: int
    gradient_norm: float = 0.0


@dataclass(frozen=True)
class StageJobDone:
    """A job of a stage is done, or what was wrong."""

    number: int
    values: memoryview = NO_VALUES  # the activations or the gradient, encoded
    seconds: float = 0.0  # how long it took
    problem: str = ""
    failed: bool = False  # here; else its result is of no use any more
    shape: tuple[int, ...] = ()


ToIO = Begin | Published | TrainingEvent | IterationStarted | StageJobDone | ShareMessage


@dataclass(frozen=True, kw_only=True)
class RoundDone(RoundResult):
    """A round has closed."""

    fragment: int
    exchange_s: float = 0.0  # how long it was on its way
    waited_for: str = ""  # the peer that was last
    # By shard, who has given the reduction, a number for this in which life and group, and its
    # hash.
    received: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True)
class RoundFailed:
    """A round was given up, or left to the others by a peer that leaves; nothing may be applied."""

    fragment: int
    round: int
    reason: str
    waiting_for: tuple[str, ...]
    # The ranges of the fragment whose reduction is known and has this peer in it: what was
    # contributed there comes back with another peer's state, and must not be contributed again.
    counted: Ranges = ()
    error: Tensor | None = None
    handed_in: bool = False  # the reducers have all of it


@dataclass(frozen=True)
class PrefetchedAnchor:
    """The mean anchor of the group of a fragment's next round; None if it does not come in time."""

    fragment: int
    round: int
    mean_anchor: Tensor | None


@dataclass(frozen=True)
class Adopt:
    """Another peer's committed states, by fragment, and its position in the schedule."""

    donor: str
    step: int
    states: dict[int, FragmentState]
    reason: str
    me: str = ""  # this peer, as contributors are listed
    confirmed_by: tuple[str, ...] = ()  # others that hold them too
    # By fragment, the rounds of this peer's that are in none of them.
    given_up: Mapping[int, int] = field(default_factory=dict)
    # In these fragments they win over this peer's, be it a round further by now.
    replaced: frozenset[int] = frozenset()


@dataclass(frozen=True)
class FastestPace:
    fastest_s: float


@dataclass(frozen=True)
class OthersWait:
    """Most of the others have come to this step, where they began or applied a round."""

    step: int


@dataclass(frozen=True)
class SkipAhead:
    """The others are far ahead in the schedule: go on at this step."""

    step: int


@dataclass(frozen=True)
class Started:
    """Training may begin. `group` lays out the first round; empty where one under way is joined."""

    group: tuple[str, ...]


class JobKind(IntEnum):
    """The work of a stage on a microbatch, the more urgent first: a backward frees memory."""

    BACKWARD = 0
    LEAVE = 1  # the backward of the origin's own layers
    LOSS = 2
    FORWARD = 3
    ENTER = 4  # the forward of the origin's own layers


@dataclass(frozen=True)
class StageJob:
    """A job for the train thread; values are encoded, and all of `shape`."""

    number: int
    iteration: int
    kind: JobKind
    microbatch: int  # its number among all origins', or the origin's own
    shape: tuple[int, ...]
    values: memoryview = NO_VALUES  # the stage's input
    gradient: memoryview = NO_VALUES  # that of its output


@dataclass(frozen=True)
class IterationOver:
    """All origins have done their microbatches. `discard`: what this stage counted is left out."""

    iteration: int
    discard: bool = False


@dataclass(frozen=True)
class AllStarted:
    """The others have started too, in a plan of pairs: the first step may be taken."""


@dataclass(frozen=True)
class StageMove:
    """Leave this stage, and serve that one; `orphaned`: nobody does, so it has to be rebuilt."""

    stage: int
    orphaned: bool


@dataclass(frozen=True)
class Stop:
    """End now, in good order. `error` is set when the I/O thread cannot go on."""

    reason: str
    error: BaseException | None = None


OfRounds = RoundDone | RoundFailed | PrefetchedAnchor
OfOthers = Adopt | FastestPace | OthersWait | SkipAhead | Started | AllStarted
ToTrain = OfRounds | OfOthers | StageJob | IterationOver | StageMove | Stop


class Mailbox:
    def __init__(self) -> None:
        self._to_train: queue.SimpleQueue[ToTrain] = queue.SimpleQueue()
        self._to_share: queue.SimpleQueue[LeaseMessage | Stop] = queue.SimpleQueue()
        self._deliver: Callable[[ToIO], None] | None = None
        self._io_loop: asyncio.AbstractEventLoop | None = None

    def connect(
        self, deliver: Callable[[ToIO], None], loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        """io: has `post` call this on the loop's thread; without a loop at once."""
        self._io_loop, self._deliver = loop, deliver

    def post(self, message: ToIO) -> None:
        """train: never blocks."""
        if self._deliver is None:
            raise RuntimeError("the I/O thread is not running")
        if self._io_loop is None:
            self._deliver(message)
        else:
            with suppress(RuntimeError):  # the loop is closed: a `Stop` says why
                self._io_loop.call_soon_threadsafe(self._deliver, message)

    def answer(self, message: ToTrain | LeaseMessage) -> None:
        """io, or a signal handler: never blocks."""
        if isinstance(message, LeaseMessage | Stop):
            self._to_share.put(message)
        if not isinstance(message, LeaseMessage):
            self._to_train.put(message)

    def poll(self) -> ToTrain | None:
        with suppress(queue.Empty):
            return self._to_train.get_nowait()
        return None

    def wait(self, timeout_s: float | None = None) -> ToTrain | None:
        """train: the next message; None when there is none in time, or a signal may have come."""
        with suppress(queue.Empty):
            return self._to_train.get(
                timeout=_LOOK_S if timeout_s is None else min(_LOOK_S, timeout_s)
            )
        return None

    def wait_lease(self) -> LeaseMessage | Stop:
        """train: the next message of a stream of samples; at the end of the run always a Stop."""
        message = None
        while message is None:
            with suppress(queue.Empty):
                message = self._to_share.get(timeout=_LOOK_S)
        if isinstance(message, Stop):
            self._to_share.put(message)
        return message


class IOThread(LoopThread):
    """The event loop that runs a node, beside the train thread. Args: make: is called on it."""

    def __init__(self, make: Callable[[], "Node"], mailbox: Mailbox, log: Log) -> None:
        super().__init__("murmur-io", log, lambda error: mailbox.answer(Stop(str(error), error)))
        self._make, self._mailbox = make, mailbox
        self._node: Node | None = None

    @property
    def node(self) -> "Node":
        assert self._node is not None, "start() comes first"
        return self._node

    async def _main(self) -> None:
        self._loop, node = asyncio.get_running_loop(), self._make()
        self._node, self._close = node, node.close
        address = await node.listen()
        self._mailbox.connect(node.deliver, self._loop)
        self._ready.set_result(address)
        await node.run()

"""The dialogue of pair rounds by hand: what one peer says to what, without any I/O."""

from collections.abc import Sequence
from typing import TypeVar

import pytest

from tests.protocol.views import view
from worker.exchange.pairwise.rounds import PairRounds
from worker.exchange.pairwise.stream import (
    ANCHOR,
    CONTRIBUTION,
    Action,
    AverageAnchors,
    CheckPart,
    DropStream,
    EndStream,
    Misfit,
    OpenStream,
    PairHeader,
    PairPart,
    PairSettings,
    PairStaged,
    PairStream,
    PartForm,
    PartHeader,
    PartProgress,
    PartValid,
    Refusal,
    RefusalKind,
    RoundEnded,
    Send,
    SendPart,
    StreamClosed,
    TellAnchor,
    Unfit,
)
from worker.exchange.types import Failed, RoundConfig, Succeeded, Suspect

CONFIG = RoundConfig()
SIZE = 400
A = TypeVar("A")


def of(kind: type[A], actions: Sequence[Action]) -> list[A]:
    return [action for action in actions if isinstance(action, kind)]


class Pair:
    """Peer `me` of the pair ab, or of the only group of `peers`, at version 0 with its anchor laid
    out; the hash of a part is 10 times the number of its peer, and 1 more for a contribution."""

    def __init__(self, me: str = "b", peers: str = "ab", *, lay: bool = True) -> None:
        self.now, self.me, self.peers = 100.0, me, peers
        form = PartForm(1, "fp32", SIZE)
        self.machine = PairRounds(
            PairSettings(
                me=me,
                run=77,
                forms=[(form, form)],
                rounds=[9],
                config=CONFIG,
                group_size=len(peers),
                anchors_told=True,
                anchors_awaited=True,
            )
        )
        self.machine.on_view(view(peers), self.now)
        self.first = self.machine.advanced(0, 0, self.now)
        if lay:
            self.first += self.machine.lay(0, 0, self.part(ANCHOR), self.now)
            self.first += self.machine.poll(self.now)

    def part(self, index: int) -> PairPart:
        return PairPart(self.hash(self.me, index), SIZE)

    def hash(self, peer: str, index: int) -> int:
        return 10 * (ord(peer) - 96) + index

    def begin(self) -> list[Action]:
        return self.machine.begin((0, 0), self.part(CONTRIBUTION), None, self.now)

    def header(self, sender: str = "a", **changes: object) -> PairHeader:
        fields = {"run": 77, "fragment": 0, "round": 0, "group": tuple(self.peers)}
        return PairHeader(**{**fields, "sender": sender, **changes})

    def call(self, sender: str = "a", **changes: object) -> tuple[PairStream, list[Action]]:
        """A partner calls this peer."""
        stream = self.machine.accept(self.now)
        return stream, self.hear(stream, self.header(sender, **changes))

    def hear(self, stream: PairStream, *events: object) -> list[Action]:
        """Checks pass at once."""
        actions: list[Action] = []
        for event in events:
            new = self.machine.handle(stream, event, self.now)
            actions += new
            for check in of(CheckPart, new):
                actions += self.machine.handle(stream, PartValid(check.part), self.now)
        return actions

    def give(self, stream: PairStream, index: int, **changes: int) -> list[Action]:
        """All of a part of the partner's."""
        return self.hear(stream, self.part_header(stream, index, **changes), PartProgress(SIZE))

    def part_header(self, stream: PairStream, index: int, **changes: int) -> PartHeader:
        fields = {"codec": 1, "total_bytes": SIZE, "offset": 0, "weight": 1}
        fields["hash"] = self.hash(stream.peer, index)
        return PartHeader(**{"part": index, **fields, **changes})

    def said(self, actions: Sequence[Action]) -> list[object]:
        """What is said, by kind: the header, parts by index, the last word."""
        return [
            action.header.part if isinstance(action, SendPart) else type(action.message).__name__
            for action in actions
            if isinstance(action, Send | SendPart)
        ]


# -------------------------------------------------------------------------- a round that goes well


def test_the_callee_answers_with_its_header_and_its_anchor_and_holds_the_rest_back() -> None:
    pair = Pair("b")
    stream, actions = pair.call()
    assert pair.said(actions) == ["PairHeader", ANCHOR]
    assert pair.said(pair.begin()) == [CONTRIBUTION]
    pair.give(stream, ANCHOR)
    assert pair.said(pair.give(stream, CONTRIBUTION)) == ["PairStaged"]
    last = pair.hear(stream, PairStaged())
    assert [type(action) for action in last] == [RoundEnded, EndStream]
    assert last[0].outcome == Succeeded()


def test_the_caller_calls_when_the_round_is_laid_out_and_leaves_the_end_to_the_callee() -> None:
    pair = Pair("a")
    (opened,) = of(OpenStream, pair.first)
    stream = opened.stream
    assert (stream.peer, stream.attempt) == ("b", 1)
    assert pair.said(pair.first) == ["PairHeader"]
    assert pair.said(pair.hear(stream, pair.header("b"))) == [ANCHOR]
    assert of(OpenStream, pair.begin()) == []
    pair.give(stream, ANCHOR)
    pair.give(stream, CONTRIBUTION)
    last = pair.hear(stream, PairStaged())
    assert of(RoundEnded, last)
    assert not of(EndStream, last)
    assert pair.hear(stream, PartProgress(1)) == [], "nothing more matters"
    assert pair.hear(stream, StreamClosed(None)) == []


def test_all_anchors_are_averaged_before_the_round_and_told_unless_it_has_begun() -> None:
    pair = Pair("b")
    stream, _ = pair.call()
    (average,) = of(AverageAnchors, pair.give(stream, ANCHOR))
    assert pair.machine.anchors_averaged(average.buffer, 5) == [TellAnchor(0, 0, 5)]
    pair.begin()
    assert pair.machine.anchors_averaged(average.buffer, 5) == []


def test_who_hears_nothing_may_go_on_without_anchors() -> None:
    pair = Pair("b")
    assert pair.machine.due_at(pair.now) == pair.now + 1.0
    pair.now += 1.0
    assert of(TellAnchor, pair.machine.tick(pair.now)) == [TellAnchor(0, 0, None)]
    assert of(TellAnchor, pair.machine.tick(pair.now + 1)) == []


def test_an_anchor_goes_ahead_only_while_no_round_is_busy() -> None:
    pair = Pair("b", lay=False)
    form = PartForm(1, "fp32", SIZE)
    pair.machine = PairRounds(
        PairSettings(me="b", run=77, forms=[(form, form)] * 2, rounds=[9, 9], config=CONFIG)
    )
    pair.machine.on_view(view("ab"), pair.now)
    for fragment in (0, 1):
        pair.machine.advanced(fragment, 0, pair.now)
        pair.machine.lay(fragment, 0, pair.part(ANCHOR), pair.now)
    pair.begin()
    pair.machine.poll(pair.now)
    stream, actions = pair.call(fragment=1)
    assert pair.said(actions) == ["PairHeader"]
    assert pair.said(pair.machine.give_up(0, "enough", pair.now)) == [ANCHOR]
    assert stream.held is not None


def test_an_anchor_lets_a_round_go_first_that_begins_in_the_same_instant() -> None:
    pair = Pair("b", lay=False)
    form = PartForm(1, "fp32", SIZE)
    pair.machine = PairRounds(
        PairSettings(me="b", run=77, forms=[(form, form)] * 2, rounds=[9, 9], config=CONFIG)
    )
    pair.machine.on_view(view("ab"), pair.now)
    pair.machine.advanced(0, 0, pair.now)
    pair.machine.lay(0, 0, pair.part(ANCHOR), pair.now)
    pair.machine.poll(pair.now)
    _, actions = pair.call(fragment=1)
    assert pair.said(actions) == []  # this peer has not come to that round
    pair.machine.advanced(1, 0, pair.now)
    assert pair.said(pair.machine.lay(1, 0, pair.part(ANCHOR), pair.now)) == ["PairHeader"]
    pair.begin()
    assert pair.said(pair.machine.poll(pair.now)) == []
    assert pair.said(pair.machine.give_up(0, "enough", pair.now)) == [ANCHOR]


# ------------------------------------------------------------------------------------- admission


@pytest.mark.parametrize(
    ("changes", "kind", "declined"),
    [
        ({"run": 5}, RefusalKind.RUN, True),
        ({"group": ("a", "c")}, RefusalKind.GROUP, True),
        ({"fragment": 1}, RefusalKind.INVALID, False),
        ({"sender": "x"}, RefusalKind.AGAIN, False),
        ({"sender": "b"}, RefusalKind.GROUP, True),
    ],
)
def test_a_header_that_does_not_fit_is_refused(
    changes: dict[str, object], kind: RefusalKind, declined: bool
) -> None:
    pair = Pair("b")
    stream, actions = pair.call(**changes)
    (misfit,), (sent,) = of(Misfit, actions), of(Send, actions)
    assert misfit.declined is declined
    assert isinstance(sent.message, Refusal)
    assert sent.message.kind is kind
    assert actions[-1] == EndStream(stream)
    assert pair.hear(stream, PairStaged()) == []


def test_a_caller_waits_until_this_peer_has_come_to_its_round() -> None:
    pair = Pair("b", lay=False)
    stream, actions = pair.call()
    assert actions == []
    later = pair.machine.lay(0, 0, pair.part(ANCHOR), pair.now)
    assert pair.said(later) == ["PairHeader"]
    assert pair.said(pair.machine.poll(pair.now)) == [ANCHOR]
    early, actions = pair.call(round=3)
    assert actions == []
    gone = pair.machine.advanced(0, 4, pair.now)
    (refused,) = [a.message for a in of(Send, gone) if a.stream is early]
    assert refused == Refusal(RefusalKind.PRUNED, "round 3 is over here")
    assert DropStream(stream) in gone


def test_a_stream_that_does_not_say_what_it_is_for_is_ended() -> None:
    pair = Pair("b")
    stream = pair.machine.accept(pair.now)
    assert pair.machine.tick(pair.now + 9.9)[1:] == []
    assert EndStream(stream) in pair.machine.tick(pair.now + 10.0)


def test_what_is_no_header_is_refused() -> None:
    pair = Pair("b")
    for event, kind in (
        (PairStaged(), RefusalKind.INVALID),
        (Unfit(True, "garbage"), RefusalKind.AGAIN),
    ):
        actions = pair.hear(pair.machine.accept(pair.now), event)
        assert [type(a) for a in actions] == [Misfit, Send, EndStream]
        assert actions[1].message.kind is kind


def test_a_later_stream_of_a_partner_takes_the_place_of_the_earlier() -> None:
    pair = Pair("b")
    first, _ = pair.call()
    second, actions = pair.call()
    assert actions[0] == DropStream(first)
    assert pair.hear(first, StreamClosed("reset")) == []
    assert second.held is not None


# ------------------------------------------------------------------------------------- resumption


def test_a_part_goes_on_where_it_broke_off_both_ways() -> None:
    pair = Pair("b")
    stream, _ = pair.call()
    pair.hear(stream, pair.part_header(stream, ANCHOR), PartProgress(100), StreamClosed("reset"))
    held = ((pair.hash("b", ANCHOR), 300), (0, 0))
    stream, actions = pair.call(held=held)
    (own,), (header, *_) = of(SendPart, actions), of(Send, actions)
    assert own.header.offset == 300
    assert header.message.held == ((pair.hash("a", ANCHOR), 100), (0, 0))
    assert of(AverageAnchors, pair.give(stream, ANCHOR, offset=100))


def test_a_partner_that_holds_something_else_is_given_all() -> None:
    _, actions = Pair("b").call(held=((999, 300), (0, 0)))
    assert of(SendPart, actions)[0].header.offset == 0


@pytest.mark.parametrize(
    ("changes", "kind", "reason"),
    [
        ({"total_bytes": 404}, RefusalKind.INVALID, "404 bytes .*expected 400 bytes of fp32"),
        ({"codec": 2}, RefusalKind.INVALID, "of codec 2"),
        ({"part": 2}, RefusalKind.INVALID, "part 2"),
        ({"offset": 300}, RefusalKind.AGAIN, "goes on at 300"),
    ],
)
def test_a_part_that_does_not_fit_is_refused(
    changes: dict[str, int], kind: RefusalKind, reason: str
) -> None:
    pair = Pair("b")
    stream, _ = pair.call()
    actions = pair.hear(stream, pair.part_header(stream, ANCHOR, **changes))
    (sent,) = of(Send, actions)
    assert sent.message.kind is kind
    assert actions[-1] == EndStream(stream)
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(sent.message.reason)


def test_what_does_not_fit_costs_a_round_that_has_begun_at_once() -> None:
    pair = Pair("b")
    stream, _ = pair.call()
    pair.begin()
    actions = pair.hear(stream, pair.part_header(stream, CONTRIBUTION, total_bytes=404))
    (ended,) = of(RoundEnded, actions)
    assert isinstance(ended.outcome, Failed)
    assert "404 bytes" in ended.outcome.reason
    (sent,) = of(Send, actions)
    assert sent.message.kind is RefusalKind.PRUNED
    assert actions[-1] == EndStream(stream)


@pytest.mark.parametrize("changes", [{"hash": 6}, {"weight": 9}], ids=["values", "weight"])
def test_other_values_replace_what_has_come_until_the_round_counts_on_them(
    changes: dict[str, int],
) -> None:
    pair = Pair("b")
    stream, _ = pair.call()
    pair.give(stream, ANCHOR)
    assert of(AverageAnchors, pair.give(stream, ANCHOR, hash=5)) == [], "told once"
    buffer = stream.buffer
    assert buffer is not None
    assert buffer.theirs["a"][ANCHOR].hash == 5
    pair.begin()
    pair.give(stream, CONTRIBUTION)
    actions = pair.hear(stream, pair.part_header(stream, ANCHOR, **changes))
    assert "other values than before" in of(Misfit, actions)[0].reason


def test_a_part_that_is_not_valid_is_dropped_and_wanted_again() -> None:
    pair = Pair("b")
    stream, _ = pair.call()
    header = pair.part_header(stream, ANCHOR)
    pair.machine.handle(stream, header, pair.now)
    (check,) = of(CheckPart, pair.machine.handle(stream, PartProgress(SIZE), pair.now))
    actions = pair.hear(stream, Unfit(True, "damaged", check.part))
    assert of(Send, actions)[0].message.kind is RefusalKind.AGAIN
    _, actions = pair.call()
    assert of(Send, actions)[0].message.held == ((0, 0), (0, 0))


# --------------------------------------------------------------------------- breaks and giving up


def test_a_stream_that_breaks_before_the_round_is_not_told_to_anybody() -> None:
    pair = Pair("a")
    stream = of(OpenStream, pair.first)[0].stream
    assert pair.hear(stream, StreamClosed("reset")) == []
    assert of(OpenStream, pair.begin())[0].stream.attempt == 1


def test_a_stream_that_breaks_in_the_round_is_opened_again_after_a_while() -> None:
    pair = Pair("a")
    stream = of(OpenStream, pair.first)[0].stream
    pair.begin()
    assert pair.hear(stream, StreamClosed("reset")) == [Suspect("b")]
    assert pair.machine.due_at(pair.now) == pair.now + CONFIG.retry_s
    assert of(OpenStream, pair.machine.tick(pair.now + 0.2)) == []
    (opened,) = of(OpenStream, pair.machine.tick(pair.now + CONFIG.retry_s))
    assert opened.stream.attempt == 2


def test_who_has_succeeded_calls_again_until_its_partner_knows() -> None:
    pair = Pair("a")
    stream = of(OpenStream, pair.first)[0].stream
    pair.hear(stream, pair.header("b"))
    pair.begin()
    pair.give(stream, ANCHOR)
    pair.give(stream, CONTRIBUTION)
    pair.hear(stream, PairStaged())
    assert pair.hear(stream, StreamClosed("reset")) == []
    pair.machine.on_view(view("a", dead="b"), pair.now)
    at = pair.machine.timer_at
    assert at == pair.now + CONFIG.retry_s
    assert pair.machine.elapse(at) == [], "it is held for dead; it may come back"
    pair.machine.on_view(view("ab"), at)
    (opened,) = of(OpenStream, pair.machine.elapse(at + CONFIG.retry_s))
    pair.now = at + CONFIG.retry_s
    answer = pair.hear(opened.stream, pair.header("b"))
    assert pair.said(answer) == [ANCHOR, CONTRIBUTION, "PairStaged"]


def test_who_gives_up_says_so_instead_of_the_rest_and_leaves_after_a_while() -> None:
    pair = Pair("a", "abc")
    to_b, to_c = (each.stream for each in of(OpenStream, pair.first))
    pair.hear(to_b, pair.header("b"))
    pair.begin()
    actions = pair.machine.give_up(0, "enough", pair.now)
    assert [(a.stream, a.message) for a in of(Send, actions)] == [
        (to_b, Refusal(RefusalKind.PRUNED, "given up there: enough"))
    ]
    late = pair.hear(to_c, pair.header("c"))
    assert pair.said(late) == ["Refusal"]
    assert pair.machine.elapse(pair.now + 0.9) == []
    assert set(pair.machine.elapse(pair.now + 1.0)) == {DropStream(to_b), DropStream(to_c)}
    stream, actions = pair.call("b")
    assert of(Send, actions)[0].message.kind is RefusalKind.PRUNED
    assert stream.over


def test_who_has_given_up_does_not_say_that_it_holds_everything() -> None:
    pair = Pair("b")
    stream, _ = pair.call()
    pair.give(stream, ANCHOR)
    pair.begin()
    pair.machine.give_up(0, "too late", pair.now)
    assert pair.said(pair.give(stream, CONTRIBUTION)) == []


def test_a_partner_that_declines_is_not_answered_any_more() -> None:
    pair = Pair("b")
    stream, _ = pair.call()
    assert DropStream(stream) in pair.hear(stream, Refusal(RefusalKind.PRUNED, "given up there"))
    (ended,) = of(RoundEnded, pair.begin())
    assert ended.outcome == Failed("a declines: given up there", ("a",))


@pytest.mark.parametrize("answered", [True, False])
def test_a_partner_that_wants_it_again_is_called_again(answered: bool) -> None:
    pair = Pair("a")
    stream = of(OpenStream, pair.first)[0].stream
    pair.begin()
    if answered:
        pair.hear(stream, pair.header("b"))
    actions = pair.hear(stream, Refusal(RefusalKind.AGAIN, "damaged"))
    assert actions == [DropStream(stream), Suspect("b")]


def test_a_group_that_changes_is_laid_out_again_with_the_same_anchor() -> None:
    pair = Pair("a", "abc")
    streams = [each.stream for each in of(OpenStream, pair.first)]
    pair.peers = "abc"
    actions = pair.machine.on_view(view("ab", dead="c"), pair.now)
    assert of(DropStream, actions) == [DropStream(stream) for stream in streams]
    assert [each.stream.peer for each in of(OpenStream, actions)] == ["b"]
    assert pair.machine.partners == {"b"}


def test_without_an_anchor_nobody_waits() -> None:
    pair = Pair("b", lay=False)
    assert not pair.machine.wants_anchor(0, 0)
    assert pair.machine.wants_anchor(0, 8)
    assert not pair.machine.wants_anchor(0, 9)
    assert pair.machine.cannot_lay(0, 0) == [TellAnchor(0, 0, None)]


def test_a_round_that_was_skipped_is_over_and_a_kept_one_is_said_again() -> None:
    pair = Pair("b")
    stream, _ = pair.call()
    pair.begin()
    for index in (ANCHOR, CONTRIBUTION):
        pair.give(stream, index)
    pair.hear(stream, PairStaged())
    pair.machine.advanced(0, 2, pair.now)
    _, again = pair.call()
    assert pair.said(again) == ["PairHeader", ANCHOR, CONTRIBUTION, "PairStaged"]
    pair.machine.advanced(0, 3, pair.now)
    _, over = pair.call()
    assert pair.said(over) == ["Refusal"]


def test_forgetting_a_stream_blames_nobody() -> None:
    pair = Pair("b")
    stream, _ = pair.call()
    pair.begin()
    pair.machine.forget(stream)
    assert pair.hear(stream, StreamClosed("reset")) == []
    _, actions = pair.call()
    assert of(DropStream, actions) == []


@pytest.mark.parametrize("me", ["a", "c"], ids=["calls", "is called"])
def test_a_partner_that_has_ended_its_side_still_hears_the_last_word(me: str) -> None:
    """Of three, one is missing yet when another has said all that it has to say."""
    pair = Pair(me, "abc")
    if me == "a":
        stream = of(OpenStream, pair.first)[0].stream
        pair.hear(stream, pair.header("b"))
        other = of(OpenStream, pair.first)[1].stream
        pair.hear(other, pair.header("c"))
    else:
        stream, other = pair.call("b")[0], pair.call("a")[0]
    pair.begin()
    for index in (ANCHOR, CONTRIBUTION):
        pair.give(stream, index)
    assert pair.hear(stream, PairStaged(), StreamClosed(None)) == []
    pair.give(other, ANCHOR)
    actions = pair.give(other, CONTRIBUTION)
    assert [a.stream for a in of(Send, actions)] == [stream, other]
    assert of(EndStream, actions) == [EndStream(stream)]

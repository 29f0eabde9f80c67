"""Who holds which blocks of samples, to messages and back."""

import itertools
from collections.abc import Iterable, Sequence

from murmuration.algorithms.fragments import Ranges
from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker.leases.types import Block, Holding, LeaseNews, OpenedStream
from murmuration.worker.wire.errors import WireError
from murmuration.worker.wire.messages import check_name

_MOST_HOLDINGS = 4096
_MOST_BLOCKS = 1024  # of one peer
_MOST_STREAMS = 1024
_MOST_OPENED = 64  # streams that one peer has drawn from
_MOST_RANGES = 1 << 14
_LAST_BLOCK = 1 << 63


def lease_news_to_message(news: LeaseNews, run: int) -> pb.LeaseNews:
    ledgers = {stream: pb.StreamLedger(stream=stream) for stream in news.done}
    for stream, ranges in news.done.items():
        numbers = (0, *itertools.chain.from_iterable(ranges))
        ledgers[stream].done.extend(b - a for a, b in itertools.pairwise(numbers))
    for block, used in news.cursors.items():
        ledger = ledgers.setdefault(block.stream, pb.StreamLedger(stream=block.stream))
        ledger.cursors.append(pb.BlockCursor(number=block.number, used=used))
    holdings = [
        pb.BlockHolding(
            peer=each.peer,
            epoch=each.epoch,
            sequence=each.sequence,
            held=_messages(each.held),
            asked=_messages(each.asked),
            streams=[pb.OpenedStream(**stream._asdict()) for stream in each.streams],
        )
        for each in news.holdings
    ]
    return pb.LeaseNews(run=run, holdings=holdings, ledgers=ledgers.values())


def lease_news_from_message(message: pb.LeaseNews, run: int) -> LeaseNews:
    """Raises WireError: of another run, nobody's, or more than a swarm can have."""
    if message.run != run:
        raise WireError("another run's blocks")
    if not 0 < len(message.holdings) <= _MOST_HOLDINGS:
        raise WireError(f"{len(message.holdings)} holdings of blocks in one message")
    if len(message.ledgers) > _MOST_STREAMS:
        raise WireError(f"{len(message.ledgers)} streams of samples; at most {_MOST_STREAMS}")
    done: dict[int, Ranges] = {}
    cursors: dict[Block, int] = {}
    for ledger in message.ledgers:
        most = max(len(ledger.done), len(ledger.cursors))
        numbers = list(itertools.accumulate(ledger.done)) if most <= _MOST_RANGES else [0]
        rising = all(a < b for a, b in itertools.pairwise(numbers))
        if len(numbers) % 2 or not rising or max(numbers, default=0) > _LAST_BLOCK:
            raise WireError("what is used of a stream is no list of ranges")
        done[ledger.stream] = tuple(zip(numbers[::2], numbers[1::2], strict=True))
        cursors |= {Block(ledger.stream, each.number): each.used for each in ledger.cursors}
    return LeaseNews(tuple(map(_holding, message.holdings)), done, cursors)


def _holding(message: pb.BlockHolding) -> Holding:
    check_name(message.peer)
    held, asked = _blocks(message.held), _blocks(message.asked)
    if len(message.streams) > _MOST_OPENED:
        raise WireError(f"{len(message.streams)} streams of one peer; at most {_MOST_OPENED}")
    streams = tuple(OpenedStream(each.id, each.name, each.length) for each in message.streams)
    return Holding(message.peer, message.epoch, message.sequence, held, asked, streams)


def _messages(blocks: Iterable[Block]) -> list[pb.SampleBlock]:
    return [pb.SampleBlock(stream=block.stream, number=block.number) for block in blocks]


def _blocks(messages: Sequence[pb.SampleBlock]) -> tuple[Block, ...]:
    if len(messages) > _MOST_BLOCKS:
        raise WireError(f"{len(messages)} blocks of one peer; at most {_MOST_BLOCKS}")
    return tuple(Block(each.stream, each.number) for each in messages)

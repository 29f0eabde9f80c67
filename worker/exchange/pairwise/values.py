"""Values of pair rounds: encoded, checked and averaged."""

from functools import partial
from typing import TYPE_CHECKING

from murmuration.algorithms.codecs import Codec, codec_by_name
from murmuration.algorithms.diloco import mean_in_order
from murmuration.worker import wire
from murmuration.worker.exchange.pairwise.round import ANCHOR, CONTRIBUTION, OwnPart, PairRound
from murmuration.worker.exchange.round_context import Context

if TYPE_CHECKING:
    from torch import Tensor

    from murmuration.worker.training.mailbox import Begin


class PairValues:
    """Args: context: plan, sizes, where heavy work runs."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def codec(self, part: int) -> Codec:
        """The wire codec of a part."""
        plan = self._context.plan
        return codec_by_name(plan.anchor_codec if part == ANCHOR else plan.codec)

    def total_bytes(self, fragment: int, part: int) -> int:
        """The encoded size of a fragment's part."""
        elements, exact = self._context.elements[fragment], self._context.limbs(fragment)
        return wire.encoded_bytes(self.codec(part), elements, exact)

    async def contribution(self, begin: "Begin") -> OwnPart:
        """As it goes to partners. Raises ValueError: not for the codec."""
        context = self._context
        encoded = await context.encoded(
            self.codec(CONTRIBUTION),
            begin.values,
            exact=context.limbs(begin.fragment),
            error=context.plan.keeps,
        )
        return OwnPart(*encoded, context.weight(begin.weight))

    async def anchor(self, fragment: int, anchor: "Tensor") -> OwnPart:
        """As it goes to partners. Raises ValueError: not for the codec."""
        codec, exact = self.codec(ANCHOR), self._context.limbs(fragment)
        lossy = codec.name != "fp32"
        return OwnPart(*await self._context.encoded(codec, anchor, exact=exact, error=lossy))

    async def check(self, fragment: int, part: int, incoming: wire.Incoming) -> None:
        """Raises WireError: a part that is complete is not what it should be."""
        elements, exact = self._context.elements[fragment], self._context.limbs(fragment)
        codec = self.codec(part)
        incoming.verify()
        await self._context.worked(
            elements,
            lambda: wire.check_values(codec, incoming.buffer, elements, exact=exact),
        )

    async def mean_anchor(self, round_: PairRound) -> "Tensor":
        """As it has arrived everywhere, with what the own anchor's encoding left out: each keeps
        that, so nothing of all anchors' mean is lost, and small steps add up."""
        mean, rest = await self.mean(round_, ANCHOR), round_.own[ANCHOR].left_out
        return mean if rest is None else mean.add_(rest)

    async def mean(self, round_: PairRound, part: int) -> "Tensor":
        """Of a part of all peers of the round."""
        codec, elements = self.codec(part), self._context.elements[round_.fragment]
        parts = round_.parts(part)
        weights = [each.weight for each in parts] if part == CONTRIBUTION else None
        mean_of = partial(mean_in_order, weights=weights)
        exact = self._context.limbs(round_.fragment)
        return await self._context.worked(
            len(parts) * elements,
            lambda: wire.average(
                codec, [each.raw for each in parts], elements, mean_of, exact=exact
            ),
        )

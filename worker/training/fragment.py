"""One fragment on this peer: its outer optimizer, its local parameters, and the round in flight.

train thread only, but for `_prepared`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from murmuration.algorithms.diloco import AT_HOME, pseudo_gradient
from murmuration.algorithms.fragment_state import (
    FragmentOptimizer,
    FragmentState,
    Outcome,
    RoundResult,
)
from murmuration.algorithms.fragments import Fragment, Ranges, complement, integers_of
from murmuration.algorithms.plan import Plan
from murmuration.worker.errors import UsageError
from murmuration.worker.training import device
from murmuration.worker.training.mailbox import OfRounds, PrefetchedAnchor, RoundDone, RoundFailed
from murmuration.worker.wire import are_finite, is_finite, state_hash

if TYPE_CHECKING:
    from murmuration.worker.library.site import Site

_VARIANCE = "running_var"  # of torch's normalisations
_NORMALISATION = ("running_mean", _VARIANCE)
_SANE = 2.0**50  # larger ones stand for infinity, as in masks
_BESIDE_ELEMENTS = 1 << 18  # from so many values on an outer step takes longer than a thread's turn

# Outer steps beside inner steps, one at a time.
_beside = ThreadPoolExecutor(1, "murmur-outer-step")


class FragmentReplica(FragmentOptimizer):
    """Its methods read and write the local parameters; those of `FragmentOptimizer` do not.

    Args: parameters: the local ones by name, detached; at first the anchor too; accessor: reads and
    writes them; None where they are all in this process. Attributes: at_home: statistics of which
    some values are no numbers, or were: those are not exchanged. Raises UsageError: one of the
    parameters is not finite."""

    def __init__(
        self,
        fragment: Fragment,
        plan: Plan,
        parameters: Mapping[str, Tensor],
        accessor: "Site | None" = None,
    ) -> None:
        self.fragment, self._accessor, self._parameters = fragment, accessor, parameters
        self._statistics = [s for s in fragment.specs if s.averaged and s.integers is None]
        self._odd_at_first: dict[str, Tensor] = {}
        self.at_home: set[str] = set()
        anchor = self.first_values()
        outer = plan.exchange != "none" and plan.payload == "pseudo_gradient"
        momentum = torch.zeros_like(anchor) if outer else anchor.new_empty(0)
        started = FragmentState(0, 0, (), anchor, momentum, state_hash(anchor, momentum, ()))
        super().__init__(plan, started, state_hash, fragment.averaged, fragment.exact)
        self.arrived: RoundDone | RoundFailed | None = None
        self._outcome: tuple[FragmentState, RoundResult, Future[Outcome]] | None = None
        self._prefetched: PrefetchedAnchor | None = None

    @property
    def local(self) -> Tensor:
        """A copy of the local parameters, 1-D; for what is not exchanged, the anchor's value."""
        return self._shared(self._flat())

    @property
    def _here(self) -> list[Tensor]:
        """The local parameters as they are now: a user's loop may put others in their place."""
        return [self._parameters[spec.name] for spec in self.fragment.specs]

    def _flat(self) -> Tensor:
        if self._accessor is not None:
            return self._accessor.read(self.fragment)
        flat = device.empty_on_host(self.fragment.elements, here := self._here)
        device.copy_to_host(zip(self.fragment.views(flat).values(), here, strict=True))
        return flat

    def learned(self) -> Tensor:
        """The pseudo-gradient of the local parameters by now, 1-D fp32, fresh."""
        local = self.local
        return pseudo_gradient(self.as_held(self.start), local, out=local)

    def held(self, *, copied: bool) -> dict[str, Tensor]:
        """The local parameters by name: copies, or they may be the parameters themselves."""
        if copied or self._accessor is not None:
            return self.fragment.named(self._kept_in(self.local))
        held = {s.name: self._parameters[s.name].contiguous() for s in self.fragment.specs}
        kinds = {s.name: s.integers for s in self.fragment.specs if s.integers is not None}
        return held | {name: integers_of(held[name], kind) for name, kind in kinds.items()}

    @property
    def is_finite(self) -> bool:
        return are_finite(self._parameters[s.name] for s in self.fragment.specs if not s.averaged)

    def put_back(self) -> int:
        """Undoes what was learned since the last contribution, if that is on its way or will be
        sent again, or since the start; returns how many inner steps that was."""
        start, sent = self.as_held(self.start), self.last_contribution
        if sent is not None:
            start = start - sent.g
        self.write(start)
        lost, self.work_steps = self.work_steps, 0
        return lost

    def write(self, values: Tensor) -> None:
        if self._accessor is not None:
            self._accessor.write(self.fragment, self._kept_in(values))
            return
        for name, value in self.fragment.views(device.pinned(values, self._here)).items():
            self._write_one(name, device.on_device_of(self._parameters[name], value))

    def _write_one(self, name: str, value: Tensor) -> None:
        parameter = self._parameters[name]
        value = fitting(value, parameter.dtype)
        if name in self._odd_at_first:
            value = self._kept(name, parameter.to("cpu", torch.float32), value.cpu())
        parameter.copy_(value)
        if name.endswith(_VARIANCE):  # few bits may have put it below 0
            parameter.clamp_(min=0)

    def finish(self, result: RoundResult) -> None:
        """Commits a round that closed, and goes on from it, a tensor at a time if that will do."""
        if not self.only_merges(result):
            self.write(self.apply(result, self.local))
            return
        known, self._outcome = self._outcome, None
        if known is not None and known[0] is self.state and known[1] is result:
            after, kept = known[2].result()
        else:
            after, kept = _prepared(self.outcome(result), self._here)
        self.advance(result, after)
        if self._accessor is not None:
            needed = self._plan.merge_alpha or self._plan.keeps
            self.write(self.merged(self._flat() if needed else after.anchor, *kept))
            return
        views = [self.fragment.views(each) for each in kept]
        for spec, parameter in zip(self.fragment.specs, self._here, strict=True):
            there = (device.on_device_of(parameter, each[spec.name]) for each in views)
            self._write_one(spec.name, self.merged(parameter.to(torch.float32), *there))

    def as_held(self, values: Tensor) -> Tensor:
        """`values` (1-D) as the local parameters hold them: rounded where they are not fp32. So a
        pseudo-gradient is what was learned, without what the rounding took away."""
        floating = (s for s in self.fragment.specs if s.integers is None)
        if all(self._parameters[s.name].dtype is torch.float32 for s in floating):
            return values
        held = torch.empty_like(values)
        given, views = self.fragment.views(values), self.fragment.views(held)
        for name, view in views.items():
            dtype = self._parameters[name].dtype
            view.copy_(fitting(given[name], dtype).to(dtype))
        for name in (spec.name for spec in self._statistics):
            views[name][given[name] == AT_HOME] = AT_HOME
        return held

    def first_values(self) -> Tensor:
        """Reads the local parameters as an anchor to begin with, 1-D. Raises UsageError."""
        flat = self._flat()
        for spec, view in zip(self.fragment.specs, self.fragment.views(flat).values(), strict=True):
            if spec in self._statistics:
                odd = self._odd_at_first[spec.name] = ~_is_sane(view)
                view[odd] = AT_HOME
            elif not is_finite(view.flatten()):
                raise UsageError(
                    f"parameter {spec.name!r} has values that are not finite, or absurdly large: "
                    "give the model its first values before the swarm begins, or freeze it"
                )
        return flat

    def shared(self, values: Mapping[str, Tensor]) -> Tensor:
        """Values by name (gradients, and statistics as they are) as they are exchanged, 1-D."""
        return self._shared(self.fragment.flatten(values))

    def take_shared(
        self, values: Mapping[str, Tensor], mean: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """A mean by name, with this peer's own `values` where these are not exchanged."""
        own = {s.name: values[s.name].to("cpu", torch.float32) for s in self._statistics}
        return {**mean, **{name: self._kept(name, own[name], mean[name]) for name in own}}

    def _shared(self, flat: Tensor) -> Tensor:
        """Writes the anchor's value where there is none to exchange: one that is no number, or was
        none in the peer whose state the run began with."""
        views = self.fragment.views(flat) if self._statistics else {}
        anchors = self.fragment.views(self.state.anchor) if self._statistics else {}
        for name in (spec.name for spec in self._statistics):
            odd = ~_is_sane(views[name]) | (anchors[name] == AT_HOME)
            if odd.any():
                self.at_home.add(name)
                views[name].copy_(torch.where(odd, anchors[name], views[name]))
        return flat

    def _kept_in(self, values: Tensor) -> Tensor:
        """Copies values (1-D), with this peer's own where these are not exchanged."""
        if not self._statistics:
            return values
        own, kept = self.fragment.views(self._flat()), values.clone()
        for name in (spec.name for spec in self._statistics):
            view = self.fragment.views(kept)[name]
            view.copy_(self._kept(name, own[name], view))
        return kept

    def _kept(self, name: str, own: Tensor, value: Tensor) -> Tensor:
        """Takes the `value` of a statistic, but this peer's own where there is none that all share,
        or where it has become no number since: only a normalisation's is then the others'."""
        anchor, odd = self.fragment.views(self.state.anchor)[name], ~_is_sane(own)
        nobodys, first = anchor == AT_HOME, self._odd_at_first[name]
        stays = nobodys if name.endswith(_NORMALISATION) else nobodys | odd & ~first
        first &= nobodys  # the others are written now
        if odd.any():
            self.at_home.add(name)
            value = torch.where(_is_sane(value), value, anchor)  # of a merge
        return torch.where(stays, own, value) if stays.any() else value

    def queues(self) -> list[str]:
        """Finds the statistics of which some values are others than the anchor's, and some not."""
        here = {s.name: self._parameters[s.name].float().cpu() for s in self._statistics}
        anchors = self.fragment.views(self.state.anchor)
        new = {name: now[now != anchors[name]] for name, now in here.items()}
        by = {name: (now - anchors[name]).norm() for name, now in here.items()}
        held = (n for n in here if anchors[n].any())  # of zeros an average of counts looks alike
        some = (n for n in held if len(new[n]) < here[n].numel() and by[n] > new[n].norm() / 2)
        return [name for name in some if not name.endswith(_NORMALISATION)]

    def handle(self, message: OfRounds) -> None:
        """Takes the end of the round in flight, or the anchor to start the next one from. The outer
        step begins at once, beside the inner steps that are still to come."""
        if isinstance(message, PrefetchedAnchor):
            self._prefetched = message
        elif self.in_flight is not None and self.in_flight.round == message.round:
            self.arrived = message
            steps = self._plan.payload == "pseudo_gradient" and not self.in_flight.everyone
            large = self.fragment.elements >= _BESIDE_ELEMENTS and steps
            if large and isinstance(message, RoundDone) and self.only_merges(message):
                found = _beside.submit(_prepared, self.outcome(message), self._here)
                self._outcome = self.state, message, found

    @property
    def in_flight_round(self) -> int | None:
        return None if self.in_flight is None else self.in_flight.round

    @property
    def knows_next_anchor(self) -> bool:
        """Tells whether the mean anchor of the next round's group has come, or will not."""
        return self._prefetched is not None and self._prefetched.round == self.state.version

    def take_early_start(self) -> bool:
        """Goes on from the next group's mean anchor, if it has come; returns whether it has."""
        prefetched, self._prefetched = self._prefetched, None
        if prefetched is None or prefetched.mean_anchor is None:
            return False
        moved = self.go_on_from(prefetched.mean_anchor, self.local)
        if moved is not None:
            self.write(moved)
        return moved is not None

    def take_over(self, theirs: FragmentState, *, keep: bool, me: str = "", lost: int = 0) -> None:
        """Adopts another peer's committed state, and goes on from it. Args: keep: whether progress
        against the own anchor, if there is any, is kept; me: this peer, as contributors are listed;
        lost: how many of its rounds that state has not got."""
        counted: Ranges = ()
        error = None
        if isinstance(self.arrived, RoundFailed):
            counted, error = self.arrived.counted, self.arrived.error
        elif self.arrived is not None:
            counted = complement(self.arrived.missed, self.fragment.elements)
            error = self.arrived.error
        own = self.release(theirs.version, self.local, counted, error)
        if self.in_flight is None:
            self.arrived = self._outcome = None
        own = self.take_back(lost, own) if keep else own
        keep = keep and not torch.equal(own, self.state.anchor)
        self.write(self.adopt(theirs, own, keep=keep, me=me))


def _prepared(outcome: Callable[[], Outcome], here: Sequence[Tensor]) -> Outcome:
    """Any thread: what it reads is not written any more."""
    after, kept = outcome()
    return after, tuple(device.pinned(each, here) for each in kept)


def _is_sane(values: Tensor) -> Tensor:
    return values.abs() < _SANE  # which holds for no NaN


def fitting(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Clamps values to what fp16 holds, where they are to be of that type."""
    most = torch.finfo(dtype).max if dtype is torch.float16 else math.inf
    return values.clamp(-most, most) if most < math.inf else values

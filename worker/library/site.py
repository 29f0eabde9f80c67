"""Several processes of `torchrun` as one peer: DDP, FSDP2, HSDP, TP: any blocks of parameters.

Rank 0 speaks for the site. Where the others would use the network, they follow (docs/adr/0048).

    rank 0                      the others
      with speaking():            follow()
        read(fragment)      ◄──     send their shards, each by one rank that holds it
        write(fragment)     ──►     take theirs of the values
      at the end: go on     ──►     return, with what rank 0 tells of the swarm
"""

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from murmuration.algorithms.fragments import Fragment, TensorSpec, copy_values
from murmuration.worker.config import Config, fragments_of
from murmuration.worker.errors import MurmurError, UsageError
from murmuration.worker.library.hooks import UserReplica, is_sharded
from murmuration.worker.library.share import Shares
from murmuration.worker.library.steps import StepListener, catch_up
from murmuration.worker.training.fragment import fitting

T = TypeVar("T")


@dataclass(frozen=True)
class SwarmProgress:
    """The word of rank 0; after these `strides` of the schedule all meet again."""

    step: int
    strides: tuple[int, ...]
    steps: int | None
    done: bool
    name: str
    peers: tuple[str, ...]


@dataclass(frozen=True)
class _Shard:
    """A block of a parameter: where it begins, its shape, and who holds it."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    ranks: tuple[int, ...] = ()

    @property
    def elements(self) -> int:
        return prod(self.shape)

    def of(self, whole: Tensor) -> Tensor:
        ends = zip(self.offset, self.shape, strict=True)
        return whole[tuple(slice(begin, begin + length) for begin, length in ends)]


class Site:
    """One rank of a site. train thread only; created by all ranks at once. Args: parameters: the
    local ones by name, detached; plain ones are alike on all ranks; tell: rank 0: what the others
    are told when they may go on; forget: other ranks: forgets what their optimizers know."""

    def __init__(
        self,
        fragments: Sequence[Fragment],
        parameters: Mapping[str, Tensor],
        tell: Callable[[], SwarmProgress] | None = None,
        forget: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._groups: list[dist.ProcessGroup] = [dist.new_group(backend="gloo")]
        weakref.finalize(self, _end, self._groups)
        self._fragments, self._parameters, self._tell = fragments, parameters, tell
        self._forget = forget
        held: list[dict[str, _Shard]] = [{} for _ in range(self.size)]
        mine = {name: _shard(parameter) for name, parameter in parameters.items()}
        dist.all_gather_object(held, mine, group=self._group)
        self._shards = {s.name: _holders(s, held) for each in fragments for s in each.specs}

    @property
    def _group(self) -> dist.ProcessGroup:
        return self._groups[0]

    @contextmanager
    def speaking(self) -> Iterator[None]:
        """Rank 0: has the others follow meanwhile, and fail where this fails."""
        try:
            yield
        except BaseException as error:
            known = isinstance(error, MurmurError)
            self._say("failed", error if known else RuntimeError(f"rank 0: {error!r}"))
            raise
        assert self._tell is not None, "rank 0 has something to tell"
        self._say("go on", self._tell())

    def follow(self) -> SwarmProgress:
        """Other ranks: does what rank 0 says; returns what it tells in the end."""
        while True:
            match self._heard():
                case "read", index:
                    mine = self._held_of(index, lambda ranks: ranks[0] == self.rank)
                    parts = (own.cpu().contiguous() for own in mine)
                    _wait_for(*[dist.isend(part, dst=0, group=self._group) for part in parts])
                case "write", index:
                    mine = self._held_of(index, lambda ranks: self.rank in ranks)
                    taken = [(own, torch.empty(own.shape, dtype=own.dtype)) for own in mine]
                    _wait_for(*[dist.irecv(each, src=0, group=self._group) for _, each in taken])
                    for own, values in taken:
                        own.copy_(values)
                case "forget", _:
                    self._forget()
                case "go on", SwarmProgress() as progress:
                    return progress

    def read(self, fragment: Fragment) -> Tensor:
        """Rank 0: reads the fragment's local values, fresh: 1-D fp32 on the CPU."""
        if any(shard.ranks[0] for spec in fragment.specs for shard in self._shards[spec.name]):
            self._say("read", fragment.index)
        flat, coming = fragment.empty(), []
        for name, view in fragment.views(flat).items():
            for shard in self._shards[name]:
                values, place, sender = self._own(name), shard.of(view), shard.ranks[0]
                if sender:
                    alike = place.dtype == values.dtype and place.is_contiguous()
                    values = place if alike else torch.empty(shard.shape, dtype=values.dtype)
                    work = dist.irecv(values, src=sender, group=self._group)
                    coming.append((work, place, values))
                else:
                    copy_values(place, values)
        for work, place, values in coming:
            _wait_for(work)
            copy_values(place, values)
        return flat

    def write(self, fragment: Fragment, values: Tensor) -> None:
        """Rank 0: makes these (1-D) the local values of all ranks."""
        self._say("write", fragment.index)
        sent = []
        for name, value in fragment.views(values).items():
            own = self._own(name)
            for shard in self._shards[name]:
                part = fitting(shard.of(value), own.dtype).to(own.dtype).contiguous()
                sent += [dist.isend(part, rank, self._group) for rank in shard.ranks if rank]
                if shard.ranks[0] == 0:
                    own.copy_(part)
        _wait_for(*sent)

    def reset_moments(self) -> None:
        self._say("forget")

    def share(self, value: Any) -> None:
        """Rank 0: makes all ranks know a lease, as all of them draw, or where streams go on."""
        self._say("share", value)

    def shared(self) -> Any:
        kind, value = self._heard()
        assert kind == "share", "all ranks do the same"
        return value

    def _held_of(self, index: int, by: Callable[[tuple[int, ...]], bool]) -> list[Tensor]:
        """The parts here of a fragment's parameters, of those that this rank is to hold."""
        names = [spec.name for spec in self._fragments[index].specs]
        return [self._own(n) for n in names if any(by(s.ranks) for s in self._shards[n])]

    def _own(self, name: str) -> Tensor:
        parameter: Any = self._parameters[name]
        own: Tensor = parameter.to_local() if is_sharded(parameter) else parameter
        return own

    def _say(self, kind: str, value: Any = None) -> None:
        """Rank 0. Args: kind: `read` or `write` a fragment, by its index; `forget`; `go on` with
        this progress; `share`; or the error that it `failed` with."""
        for rank in range(1, self.size):  # a broadcast frees its tensors in a thread of the group
            dist.send_object_list([(kind, value)], rank, self._group)

    def _heard(self) -> tuple[str, Any]:
        words: list[tuple[str, Any]] = [("", None)]
        dist.recv_object_list(words, 0, self._group)
        if words[0][0] == "failed":
            raise words[0][1]
        return words[0]


class SiteRank(StepListener):
    """The `murmuration.Swarm` of ranks of a site but the first; arguments of rank 0 count."""

    name = address = ""  # of the site; no address, for rank 0 serves
    step, is_first = 0, False  # the position in the schedule
    steps: int | None = None  # of the run, None without an end
    peers: tuple[str, ...] = ()  # by name, as of the last round

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], **_arguments: Any
    ) -> None:
        self._replica = UserReplica(model, optimizer)
        _ = self._replica.frozen_hash  # all ranks gather what it is of
        config: Config = agreed(None)[0]
        fragments, parameters = fragments_of(self._replica.schema, config), self._replica.parameters
        self._site = site = Site(fragments, parameters, forget=self._replica.reset_moments)
        seed, receive = config.run.seed, lambda _: site.shared()
        self._shares = Shares(seed, site.rank, site.size, lambda _: None, receive)
        self._open, self._in_step = ExitStack(), False
        self._follow()

    def __enter__(self) -> Self:
        with ExitStack() as opening:
            self._steps = opening.enter_context(self._replica.followed(self))
            self._shares.load_streams(self._site.shared())
            self._follow()
            self._open = opening.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._open:
            self._shares.end()
            if kind is None:
                self._steps.finish()
                self._follow()

    def _follow(self) -> None:
        progress = self._site.follow()
        self.name, self.peers, self._done = progress.name, progress.peers, progress.done
        self.step, self.steps = progress.step, progress.steps
        self._strides = iter(progress.strides)
        self._meets_at = progress.step + sum(progress.strides)

    def _step_begins(self, *, in_closure: bool) -> None:
        if not self.done:
            self._replica.refresh()
            self.step, self._in_step = self.step + next(self._strides, 1), True

    def _step_ends(self, *, moves: bool) -> None:
        if self._in_step:
            self._in_step = False
            self._replica.refresh()
            if moves and self.step >= self._meets_at:
                self._follow()

    @property
    def done(self) -> bool:
        return self._done or self.step == self.steps

    def catch_up(self, *schedulers: Any, every: int = 1) -> None:
        catch_up(schedulers, self.step, every)

    @property
    def metrics(self) -> dict[str, object]:
        return {"step": self.step}

    def report(self, loss: float | Tensor) -> None:
        """Rank 0's loss is told."""

    def warn(self, text: str) -> None:
        """Rank 0 tells of it."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Rank 0 loads it, and shares it with the others."""

    def state_dict(self) -> dict[str, Any]:
        """Empty: rank 0 has the outer state."""
        return {}

    def shard(
        self, loader: Iterable[T], *, name: str = "", block: int | None = None
    ) -> Iterator[T]:
        """As `Swarm.shard`: batches that no other rank has either."""
        return self._shares.share(loader, name, block, lambda: self.done)

    @contextmanager
    def anchor(self) -> Iterator[nn.Module]:
        """As `Swarm.anchor`; all ranks at once."""
        self._site.follow()
        try:
            yield self._replica.model
        finally:
            self._site.follow()


def agreed(decide: Callable[[], Any] | None) -> Any:
    """Gives all ranks what rank 0 decides. Raises what that raises."""
    words: list[Any] = [None, None]
    if decide is not None:
        try:
            words[0] = decide()
        except MurmurError as error:
            words[1] = error
    dist.broadcast_object_list(words, src=0)
    if words[1] is not None:
        raise words[1]
    return words[0]


def is_site(model: object) -> bool:
    """Tells of several processes, or of one that shards its parameters, as FSDP2 of one rank."""
    if not dist.is_available() or not dist.is_initialized():
        return False
    sharded = isinstance(model, nn.Module) and any(map(is_sharded, model.parameters()))
    return sharded or dist.get_world_size() > 1


def _end(groups: list[dist.ProcessGroup]) -> None:
    """Joins a group's threads: one that frees a tensor while the interpreter ends aborts it."""
    with suppress(ValueError):  # the loop has destroyed all groups
        dist.destroy_process_group(groups.pop())
    time.sleep(0.05)  # those of the loop's groups get Python's lock, and free what they hold


def _wait_for(*works: dist.Work | None) -> None:
    for work in works:
        assert work is not None, "this process is in the group"
        work.wait()


def _shard(parameter: Any) -> _Shard:
    if not is_sharded(parameter):
        return _Shard((0,) * parameter.dim(), tuple(parameter.shape))
    chunks = parameter.__create_chunk_list__()  # as checkpoints do
    return _Shard(tuple(chunks[0].offsets), tuple(chunks[0].sizes))


def _holders(spec: TensorSpec, held: Sequence[Mapping[str, _Shard]]) -> list[_Shard]:
    """The blocks of a parameter, with their ranks. Raises UsageError: some is missing."""
    ranks: dict[_Shard, list[int]] = {}
    for rank, shards in enumerate(held):
        if (shard := shards.get(spec.name)) is not None and shard.elements:
            ranks.setdefault(shard, []).append(rank)
    if sum(each.elements for each in ranks) != spec.elements:
        raise UsageError(
            f"parameter {spec.name!r} is not of shards that the ranks of this site hold: use "
            "fully_shard, and no pipeline parallelism"
        )
    return [replace(shard, ranks=tuple(those)) for shard, those in ranks.items()]

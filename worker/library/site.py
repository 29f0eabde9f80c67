"""Several processes of `torchrun` as one peer: DDP, FSDP2, or any DTensor parameters.

Rank 0 speaks for the site. Where the others would use the network, they follow: they do what rank
0 says until it says go on, and until which step: between rounds ranks exchange nothing. A fragment
at a time is gathered, and written to all.

    rank 0                      the others
      with speaking():            follow()
        read(fragment)      ──►     gather their shards
        write(fragment)     ──►     take theirs of the values
      at the end: go on     ──►     return, with what rank 0 tells of the swarm
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from murmuration.algorithms.fragments import Fragment
from murmuration.worker.config import Config, fragments_of
from murmuration.worker.errors import MurmurError
from murmuration.worker.leases.ledger import LeaseMessage
from murmuration.worker.library.hooks import UserReplica, is_sharded, whole
from murmuration.worker.library.share import Shares
from murmuration.worker.library.steps import catch_up

T = TypeVar("T")

_Kind = Literal["read", "write", "forget", "go on", "lease", "failed"]


@dataclass(frozen=True)
class SwarmProgress:
    """What rank 0 knows of the swarm, and the others are told of it. After inner steps of these
    `strides` in the schedule all ranks meet again."""

    step: int
    strides: tuple[int, ...]
    steps: int | None
    done: bool
    name: str
    peers: tuple[str, ...]


@dataclass(frozen=True)
class _Word:
    """What rank 0 says: `read` or `write` a fragment, by its index; `forget` what the optimizers
    know; `go on` with this progress; a `lease` of samples, or None; or the error that it `failed`
    with."""

    kind: _Kind
    value: Any = None


class Site:
    """One rank of a site. train thread only; created by all ranks at once.

    Args:
        fragments: what is exchanged.
        parameters: the local ones by name, detached; DTensor or plain, and then alike on all ranks.
        tell: rank 0: what the others are told when they may go on.
        forget: other ranks: forgets what their optimizers know.
    """

    def __init__(
        self,
        fragments: Sequence[Fragment],
        parameters: Mapping[str, Tensor],
        tell: Callable[[], SwarmProgress] | None = None,
        forget: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._groups: list[dist.ProcessGroup] = [dist.new_group(backend="gloo")]
        # Its threads must end before the interpreter does: they would abort the process.
        weakref.finalize(self, self._groups.clear)
        self._fragments, self._parameters, self._tell = fragments, parameters, tell
        self._forget = forget

    @property
    def _group(self) -> dist.ProcessGroup:
        return self._groups[0]

    @contextmanager
    def speaking(self) -> Iterator[None]:
        """Rank 0: the others follow meanwhile, and fail where this fails."""
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
            word = self._heard()
            match word.kind:
                case "read":
                    self._gathered(self._fragments[word.value])
                case "write":
                    fragment = self._fragments[word.value]
                    self._take(fragment, fragment.empty())
                case "forget":
                    self._forget()
                case "go on":
                    progress: SwarmProgress = word.value
                    return progress

    def read(self, fragment: Fragment) -> Tensor:
        """Rank 0: the fragment's local values, fresh: 1-D fp32 on the CPU."""
        if self._is_sharded(fragment):
            self._say("read", fragment.index)
        return fragment.flatten(self._gathered(fragment))

    def write(self, fragment: Fragment, values: Tensor) -> None:
        """Rank 0: makes these (1-D) the local values of all ranks."""
        self._say("write", fragment.index)
        self._take(fragment, values.contiguous())

    def reset_moments(self) -> None:
        """Rank 0: the others forget what their optimizers know."""
        self._say("forget")

    def share(self, message: LeaseMessage | None) -> None:
        """Rank 0: what it was told of its samples, as all ranks draw."""
        self._say("lease", message)

    def shared(self) -> LeaseMessage | None:
        """Other ranks: the same."""
        word = self._heard()
        assert word.kind == "lease", "all ranks draw the same"
        message: LeaseMessage | None = word.value
        return message

    def _is_sharded(self, fragment: Fragment) -> bool:
        return any(is_sharded(self._parameters[s.name]) for s in fragment.specs)

    def _gathered(self, fragment: Fragment) -> dict[str, Tensor]:
        return {spec.name: whole(self._parameters[spec.name]) for spec in fragment.specs}

    def _take(self, fragment: Fragment, values: Tensor) -> None:
        dist.broadcast(values, src=0, group=self._group)
        for name, value in fragment.views(values).items():
            parameter = self._parameters[name]
            parameter.copy_(_sharded_as(value, parameter) if is_sharded(parameter) else value)

    def _say(self, kind: _Kind, value: Any = None) -> None:
        dist.broadcast_object_list([_Word(kind, value)], src=0, group=self._group)

    def _heard(self) -> _Word:
        """Raises what rank 0 has failed with."""
        words: list[Any] = [None]
        dist.broadcast_object_list(words, src=0, group=self._group)
        found: _Word = words[0]
        if found.kind == "failed":
            raise found.value
        return found


class SiteRank:
    """What `murmuration.Swarm` is on the ranks of a site but the first, with the same methods.

    Takes its arguments; those of rank 0 count.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], **_arguments: Any
    ) -> None:
        self._replica = UserReplica(model, optimizer)
        _ = self._replica.frozen_hash  # all ranks gather what it is of
        config: Config = agreed(None)[0]
        fragments = fragments_of(self._replica.schema, config)
        self._site = site = Site(
            fragments, self._replica.parameters, forget=self._replica.reset_moments
        )
        self._shares = Shares(
            config.run.seed, site.rank, site.size, lambda _: None, lambda _: site.shared()
        )
        self._open, self._in_step = ExitStack(), False
        self._follow()

    def __enter__(self) -> Self:
        """Waits until rank 0 is in the swarm."""
        with ExitStack() as opening:
            self._steps = opening.enter_context(self._replica.followed(self))
            self._follow()
            self._open = opening.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._open:
            if kind is None:
                self._steps.finish()
                self._follow()

    def _follow(self) -> None:
        self._progress = progress = self._site.follow()
        self._step, self._strides = progress.step, iter(progress.strides)
        self._meets_at = progress.step + sum(progress.strides)

    def _step_begins(self, *, in_closure: bool) -> None:
        if not self.done:
            self._replica.refresh()
            self._step, self._in_step = self._step + next(self._strides, 1), True

    def _optimizer_joins(self, optimizer: Optimizer, *, late: bool) -> None:
        pass

    def _step_ends(self, *, moves: bool) -> None:
        if self._in_step:
            self._in_step = False
            self._replica.refresh()
            if moves and self._step >= self._meets_at:
                self._follow()

    def _others_step(self, optimizer: Optimizer, tensors: int) -> None:
        pass  # rank 0 says so

    @property
    def name(self) -> str:
        """The site's."""
        return self._progress.name

    @property
    def step(self) -> int:
        """Position in the run's schedule."""
        return self._step

    @property
    def done(self) -> bool:
        """Whether the run's last step is taken."""
        return self._progress.done or self._step == self._progress.steps

    @property
    def steps(self) -> int | None:
        """As `Swarm.steps`."""
        return self._progress.steps

    def catch_up(self, *schedulers: Any, every: int = 1) -> None:
        """As `Swarm.catch_up`."""
        catch_up(schedulers, self.step, every)

    @property
    def peers(self) -> tuple[str, ...]:
        """The live peers by name, as of the last round."""
        return self._progress.peers

    @property
    def is_first(self) -> bool:
        """Never: rank 0 of a site may be."""
        return False

    @property
    def metrics(self) -> dict[str, object]:
        """The step; rank 0 has the rest."""
        return {"step": self.step}

    @property
    def address(self) -> str:
        """Rank 0 serves."""
        return ""

    def report(self, loss: float | Tensor) -> None:
        """Rank 0's loss is told."""

    def warn(self, text: str) -> None:
        """Rank 0 tells of it."""

    def state_dict(self) -> dict[str, Any]:
        """Empty: rank 0 has the outer state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Rank 0 loads it; where streams go on, all ranks read from its state."""
        self._shares.load_streams(state.get("streams", ()))

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
    """What rank 0 decides, on all ranks. Raises what that raises."""
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


def is_site() -> bool:
    """Whether this process is one of several of `torchrun`, with a process group."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _sharded_as(value: Tensor, parameter: Any) -> Tensor:
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = parameter.device_mesh, parameter.placements
    there = value.to(parameter.device)
    return distribute_tensor(there, mesh, placements, src_data_rank=None)

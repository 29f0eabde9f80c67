"""Fine-tuning along fixed random directions, of which only coefficients travel.

A model's parameters are its first values plus a sum over a pool of K seeds:

    parameters = first values + sum_k a_k z_k,  z_k ~ N(0, I) drawn from seed k

What is trained, exchanged and saved are the K coefficients a, by the same plan, codecs, rounds,
checkpoints and joins as parameters. An inner step draws a seed k and takes the slope along it from
two forward passes, which is the gradient of a_k; there is no backward pass and no moment:

    slope = (loss(parameters + eps z_k) - loss(parameters - eps z_k)) / (2 eps)
    a_k <- a_k - lr slope

How parameters follow coefficients is in docs/adr/0027.

Ref: arXiv:2312.06353 (FedKSeed); arXiv:2305.17333 (MeZO), which perturbs in place as this does.
"""

import math
import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from hashlib import blake2b

import torch
from torch import Tensor, nn

from murmuration.worker.tasks import Cursor, TaskError, next_batch
from murmuration.worker.training.device import moved
from murmuration.worker.training.model import trained_parameters
from murmuration.worker.training.replica import InnerReplica

_NAME = "seed_space_of_"
_LARGE = 1.0  # a coefficient above rounds off parameters, which are rarely larger


class SeedSpace(nn.Module):
    """The K coefficients that a model's parameters follow, trained instead. train thread only."""

    def __init__(self, parameters: list[nn.Parameter], seeds: int) -> None:
        super().__init__()
        self.coefficients = nn.Parameter(torch.zeros(seeds, dtype=torch.float32, device="cpu"))
        self._parameters_of_model = [each.requires_grad_(False) for each in parameters]
        # The coefficients that the parameters are at.
        self._followed = torch.zeros_like(self.coefficients, requires_grad=False)
        # Parameters and coefficients before the first of these was large; nothing where none is.
        self._before: tuple[list[Tensor], Tensor] | None = None

    def forward(self, values: Tensor) -> Tensor:
        """Gives the same: a model that calls its children one after another calls this, too."""
        return values

    @property
    def elements(self) -> int:
        """How many values of the model follow."""
        return sum(each.numel() for each in self._parameters_of_model)

    @torch.no_grad()
    def follow(self) -> None:
        wanted = self.coefficients.detach().cpu()
        large = bool((wanted.abs() > _LARGE).any())
        if large and self._before is None:
            self._before = self._values()
        elif not large and self._before is not None:
            self._take(self._before)
            self._before = None
        for index in torch.nonzero(wanted != self._followed).flatten().tolist():
            self._move(index, float(wanted[index]))

    @torch.no_grad()
    def perturb(self, index: int, by: float) -> None:
        """The parameters as if this coefficient were larger; `follow` takes it back."""
        self._move(index, float(self.coefficients[index]) + by)

    def _move(self, index: int, value: float) -> None:
        by = value - float(self._followed[index])
        generator = torch.Generator("cpu").manual_seed(index)
        for each in self._parameters_of_model:
            direction = torch.randn(
                each.shape, dtype=torch.float32, device="cpu", generator=generator
            )
            each.add_(direction.to(each.device), alpha=by)
        self._followed[index] = value

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Afterwards the parameters are as they were, to the bit."""
        values, before = self._values(), self._before
        try:
            yield
        finally:
            self._take(values)
            self._before = before

    def _values(self) -> tuple[list[Tensor], Tensor]:
        return [each.detach().clone() for each in self._parameters_of_model], self._followed.clone()

    @torch.no_grad()
    def _take(self, values: tuple[list[Tensor], Tensor]) -> None:
        for each, value in zip(self._parameters_of_model, values[0], strict=True):
            each.copy_(value)
        self._followed = values[1].clone()


def seed_space_of(model: nn.Module) -> SeedSpace | None:
    return next((each for each in model.children() if isinstance(each, SeedSpace)), None)


def follow(model: nn.Module) -> None:
    """Brings the parameters to where their coefficients are, where the model has those."""
    if (space := seed_space_of(model)) is not None:
        space.follow()


def give_seed_space(model: nn.Module, seeds: int) -> None:
    """Makes a model one whose coefficients are trained. Their name has the hash of its values now:
    peers that go on from other values are refused, for their manifests differ. Raises TaskError:
    parameters are not in fp32, which small steps would leave where they are."""
    parameters, hashed = trained_parameters(model), blake2b(digest_size=6)
    for name, parameter in parameters.items():
        if parameter.dtype is not torch.float32:
            raise TaskError(
                f"[inner] optimizer = 'kseed': {name} is in {parameter.dtype}; its small steps "
                "need parameters in torch.float32"
            )
        hashed.update(parameter.detach().cpu().contiguous().numpy().tobytes())
    model.add_module(_NAME + hashed.hexdigest(), SeedSpace(list(parameters.values()), seeds))


def take_seed_space(model: nn.Module) -> None:
    """Leaves the parameters where their coefficients are, and nothing else of these."""
    follow(model)
    for name, each in list(model.named_children()):
        if isinstance(each, SeedSpace):
            delattr(model, name)


class SeedReplica(InnerReplica):
    """Steps along drawn directions, not gradients. train thread only. Args: model: of seeds."""

    def backward(self, step: int) -> Mapping[str, Tensor]:
        """Finds the slope along the direction that is drawn for this place in the samples, by two
        forward passes with the same dropout; 0 where that is not finite."""
        reach, count = self._config.perturbation, self._config.accumulate
        space = seed_space_of(self.model)
        assert space is not None, "the model was given one"
        space.follow()
        index = drawn_seed(self.cursor, space.coefficients.numel())
        batches = [moved(next_batch(self.batches, "train"), self._device) for _ in range(count)]
        devices = [self._device] if self._device.type == "cuda" else []
        losses = []
        for by, last in ((reach, False), (-reach, True)):
            space.perturb(index, by)
            draws = nullcontext() if last else torch.random.fork_rng(devices)
            with draws, torch.no_grad(), self._precision():
                found = [float(self._task.loss(self.model, batch)) for batch in batches]
            losses.append(statistics.fmean(found))
        self.cursor = batches[-1].cursor
        self.loss = statistics.fmean(losses)
        slope = (losses[0] - losses[1]) / (2 * reach)
        gradient = torch.zeros_like(space.coefficients)
        gradient[index] = slope if math.isfinite(slope) else 0.0
        (name,) = trained_parameters(self.model)
        return {name: gradient} | {n: s.clone() for n, s in self._statistics.items()}


def drawn_seed(cursor: Cursor, seeds: int) -> int:
    """Draws for the step at the cursor: for each peer its own, the same after a restart."""
    place = f"{cursor.seed}/{cursor.stream}/{cursor.position}"
    return int.from_bytes(blake2b(place.encode(), digest_size=8).digest(), "big") % seeds

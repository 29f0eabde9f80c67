"""What of a model travels: trained parameters, and running statistics.

A floating-point buffer that is saved with the model, such as BatchNorm's running mean, is averaged
at each round, without momentum. Integer buffers are each peer's own.
"""

from torch import Tensor, nn

from algorithms.fragments import TensorSpec

_WRAPPERS = ("module.", "_orig_mod.")  # of DistributedDataParallel and torch.compile


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """What requires a gradient, by its name in the bare model."""
    return {bare_name(n): p for n, p in model.named_parameters() if p.requires_grad}


def running_statistics(model: nn.Module) -> dict[str, Tensor]:
    """The floating-point buffers that are saved with the model, by name."""
    saved = model.state_dict(keep_vars=True)
    return {
        bare_name(name): buffer
        for name, buffer in model.named_buffers()
        if name in saved and buffer.is_floating_point()
    }


def schema_of(model: nn.Module, *, statistics: bool = True) -> list[TensorSpec]:
    """Names and shapes of what travels, in the model's order, statistics last."""
    found = [TensorSpec(n, tuple(p.shape)) for n, p in trained_parameters(model).items()]
    if statistics:
        buffers = running_statistics(model)
        found += [TensorSpec(n, tuple(b.shape), averaged=True) for n, b in buffers.items()]
    return found


def bare_name(name: str) -> str:
    """A parameter's name without what wrappers put before it."""
    while (wrapper := next(filter(name.startswith, _WRAPPERS), None)) is not None:
        name = name.removeprefix(wrapper)
    return name.replace("._orig_mod.", ".")

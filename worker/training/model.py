"""What of a model travels: trained parameters, and running statistics.

A floating-point buffer that is saved with the model, such as BatchNorm's running mean, is averaged
at each round, without momentum. Of an integer one all take that of the round's first peer by name.
"""

from torch import Tensor, nn

from algorithms.fragments import TensorSpec, limbs_of

_WRAPPERS = ("module.", "_orig_mod.")  # of DistributedDataParallel and torch.compile


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """What requires a gradient, by its name in the bare model."""
    return {bare_name(n): p for n, p in model.named_parameters() if p.requires_grad}


def running_statistics(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that are saved with the model, by name: floating-point ones, then the limbs of
    integers. Writing into them changes the model."""
    floating = {n: b for n, b in saved_buffers(model).items() if b.is_floating_point()}
    return floating | {name: limbs_of(b) for name, b in integer_buffers(model).items()}


def integer_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Those of integers or truth values that are saved with the model, by name."""
    return {
        name: buffer
        for name, buffer in saved_buffers(model).items()
        if not (buffer.is_floating_point() or buffer.is_complex() or _is_expanded(buffer))
    }


def schema_of(model: nn.Module, *, statistics: bool = True) -> list[TensorSpec]:
    """Names and shapes of what travels, in the model's order: parameters, statistics, integers."""
    found = [TensorSpec(n, tuple(p.shape)) for n, p in trained_parameters(model).items()]
    if statistics:
        kinds = {name: buffer.dtype for name, buffer in integer_buffers(model).items()}
        found += [
            TensorSpec(name, tuple(values.shape), averaged=True, integers=kinds.get(name))
            for name, values in running_statistics(model).items()
        ]
    return found


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that are saved with the model, by name."""
    saved = model.state_dict(keep_vars=True)
    return {bare_name(n): buffer for n, buffer in model.named_buffers() if n in saved}


def _is_expanded(buffer: Tensor) -> bool:
    """Whether several of its elements are one in memory, which nothing can write to."""
    sizes = zip(buffer.shape, buffer.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in sizes)


def bare_name(name: str) -> str:
    """A parameter's name without what wrappers put before it."""
    while (wrapper := next(filter(name.startswith, _WRAPPERS), None)) is not None:
        name = name.removeprefix(wrapper)
    return name.replace("._orig_mod.", ".")

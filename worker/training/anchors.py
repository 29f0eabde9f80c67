"""The model that a checkpoint's anchors make."""

from torch import nn

from algorithms.fragments import TensorSpec, partition
from worker.config import Config
from worker.errors import CheckpointError
from worker.tasks import Task
from worker.training.checkpoint import Checkpoint


def anchored_model(saved: Checkpoint, config: Config, task: Task) -> nn.Module:
    """The task's model with the anchors as parameters.

    Args:
        saved: of a whole model.
        config, task: of its run.

    Raises:
        CheckpointError: it does not hold the whole model of its run.
    """
    model = task.model()
    parameters = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    schema = [TensorSpec(name, tuple(p.shape)) for name, p in parameters.items()]
    for fragment in partition(schema, config.plan.fragments, config.plan.pattern):
        try:
            values = fragment.views(saved.tensors[f"anchor/{fragment.index}"])
        except (KeyError, ValueError) as error:
            raise CheckpointError(
                f"{saved.path}: does not hold the whole model of its run ({error}); "
                "name a checkpoint of a worker that trained all layers"
            ) from error
        for name, value in values.items():
            parameters[name].copy_(value)
    return model

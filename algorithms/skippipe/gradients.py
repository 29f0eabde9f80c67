"""The gradient of one stage: the sum over its visits, and their number to divide it by.

Stages are visited by different microbatches when routes skip, so no common divisor fits: each stage
divides by its own visits. A microbatch is counted once, however often its backward is retried.
"""

from collections.abc import Mapping

import torch


class StageGradients:
    """Sums gradients in fp32.

    Args:
        shapes: of the stage's parameters, by name.
    """

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        self._sums = {name: torch.zeros(shape) for name, shape in shapes.items()}
        self._counted: set[int] = set()

    @property
    def visits(self) -> int:
        return len(self._counted)

    @property
    def counted(self) -> frozenset[int]:
        """The microbatches whose gradients are in the sum."""
        return frozenset(self._counted)

    def add(self, microbatch: int, gradients: Mapping[str, torch.Tensor]) -> bool:
        """Adds one visit's gradients; False if that microbatch is in the sum already.

        Raises:
            ValueError: other parameters than the stage's, or another shape. Nothing is added.
        """
        if gradients.keys() != self._sums.keys():
            unequal = sorted(gradients.keys() ^ self._sums.keys())
            raise ValueError(f"gradients of microbatch {microbatch} differ in {unequal[0]!r}")
        for name, gradient in gradients.items():
            if gradient.shape != self._sums[name].shape:
                raise ValueError(
                    f"gradient of {name!r} has shape {tuple(gradient.shape)} instead of "
                    f"{tuple(self._sums[name].shape)}"
                )
        if microbatch in self._counted:
            return False
        self._counted.add(microbatch)
        for name, gradient in gradients.items():
            self._sums[name] += gradient
        return True

    def averaged(self) -> dict[str, torch.Tensor]:
        """The sums, divided in place by the visits; zeros where nothing visited the stage.

        They are the caller's until `clear`, and nothing may be added before. An optimizer must not
        step where nothing was visited: zeros would move it by its momentum.
        """
        for value in self._sums.values():
            value /= max(1, self.visits)
        return dict(self._sums)

    def clear(self) -> None:
        """Begins the next iteration."""
        self._counted.clear()
        for value in self._sums.values():
            value.zero_()

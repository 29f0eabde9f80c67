"""The gradient of one stage: the sum over its visits, and their number to divide it by.

Stages are visited by different microbatches when routes skip, so no common divisor fits: each stage
divides by its own visits. A microbatch is counted once, however often its backward is retried.
"""

from collections.abc import Mapping

import torch


class StageGradients:
    """Sums in fp32, to which a backward adds in place: it asks first whether it may, and says
    afterwards that it has.

    Args:
        shapes: of the stage's parameters, by name.
    """

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        self.sums: Mapping[str, torch.Tensor] = {
            name: torch.zeros(shape, dtype=torch.float32, device="cpu")
            for name, shape in shapes.items()
        }
        self._counted: set[int] = set()

    @property
    def visits(self) -> int:
        return len(self._counted)

    def __contains__(self, microbatch: int) -> bool:
        """Whether its gradient is in the sums, and must not be added."""
        return microbatch in self._counted

    def added(self, microbatch: int) -> None:
        """Its gradient is in the sums from now on."""
        assert microbatch not in self._counted, "a microbatch counts once"
        self._counted.add(microbatch)

    def averaged(self) -> dict[str, torch.Tensor]:
        """The sums, divided in place by the visits; zeros where nothing visited the stage.

        They are the caller's until `clear`, and nothing may be added before. An optimizer must not
        step where nothing was visited: zeros would move it by its momentum.
        """
        for value in self.sums.values():
            value /= max(1, self.visits)
        return dict(self.sums)

    def clear(self) -> None:
        """Begins the next iteration."""
        self._counted.clear()
        for value in self.sums.values():
            value.zero_()

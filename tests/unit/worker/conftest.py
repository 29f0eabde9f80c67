from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# The same examples every time, and no deadline: a slow machine fails nothing.
settings.register_profile("steady", deadline=None, derandomize=True, max_examples=60, database=None)
settings.load_profile("steady")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors are tiny here: more threads only wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)

"""A loop that draws one epoch of numbered samples from `swarm.shard`, and says which.

    python -m tests.support.shard_loop '{"name": "w0", "batch": 4, "gate": "...", ...}'

takes the arguments of `murmuration.Swarm` as JSON. After its first batch it waits at the gate.
"""

import json
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import murmuration

SAMPLES = 611


def main() -> None:
    """Prints an event for each batch."""
    given = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    batch, gate = given.pop("batch"), given.pop("gate")
    loader = DataLoader(TensorDataset(torch.arange(SAMPLES)), batch_size=batch, shuffle=True)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with murmuration.Swarm(model, optimizer, inner_steps=5, **given) as swarm:
        for number, (samples,) in enumerate(swarm.shard(loader, block=13)):
            print(json.dumps({"event": "drawn", "samples": samples.tolist()}), flush=True)
            if number == 0:
                with open(gate):  # waits until somebody opens it to write
                    pass
            model(torch.ones(1)).sum().backward()
            optimizer.step()


if __name__ == "__main__":
    main()

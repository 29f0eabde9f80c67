"""How much harm one peer of n does by contributions within the norm limit: the loss, by swarm size.

    python -m tests.lab weight [--peers 4 8 16] [--limit 3 2 1.5] [--rounds 40]

DiLoCo in one process on a small classifier whose labels a random teacher gives: 20 steps of AdamW
a round. The last peer contributes what it has learned times minus the limit. Beside it: all honest,
the liar not there, and what the limit costs honest peers of which one is five times as fast. The
last column is the mean cosine of the liar's contributions with the sum of the others', and the
least of an honest peer in an honest run. Prints a Markdown table.
"""

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy

from murmuration.algorithms.diloco import Nesterov
from murmuration.algorithms.robust import aggregate, norm, norm_factors, norm_ratios

_INPUTS, _CLASSES, _STEPS = 16, 8, 20


def classifier(seed: int) -> nn.Sequential:
    """A teacher, or what learns from one."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(_INPUTS, 48), nn.Tanh(), nn.Linear(48, _CLASSES))


def loss_of(model: nn.Module, teacher: nn.Module, samples: int, rng: torch.Generator) -> Tensor:
    x = torch.randn(samples, _INPUTS, generator=rng)
    with torch.no_grad():
        labels = (8 * teacher(x)).argmax(1)
    return cross_entropy(model(x), labels)


def train(rounds: int, limit: float, steps: Sequence[int], *, lies: bool) -> tuple[float, float]:
    """(the loss at the end, the mean cosine of the liar; or the least of all, where none lies).

    Args: steps: of each peer in a round.
    """
    model, teacher, outer = classifier(1), classifier(2), Nesterov(0.7, 0.9)
    values = list(model.parameters())
    anchor = nn.utils.parameters_to_vector(values).detach()
    momentum = torch.zeros_like(anchor)
    rngs = [torch.Generator().manual_seed(each) for each in range(len(steps))]
    seen: list[list[float]] = [[] for _ in steps]
    for _ in range(rounds):
        given = []
        for rng, count in zip(rngs, steps, strict=True):
            nn.utils.vector_to_parameters(anchor.clone(), values)
            inner = torch.optim.AdamW(values, lr=3e-3)
            for _ in range(count):
                inner.zero_grad()
                loss_of(model, teacher, 32, rng).backward()
                inner.step()
            given.append(anchor - nn.utils.parameters_to_vector(values).detach())
        if lies:
            given[-1] *= -0.97 * limit
        factors = norm_factors(norm_ratios([norm(each) for each in given]), limit)
        total = torch.stack([each * f for each, f in zip(given, factors, strict=True)]).sum(0)
        for peer, (each, f) in enumerate(zip(given, factors, strict=True)):
            seen[peer].append(float(cosine_similarity(each, total - f * each, dim=0)))
        anchor, momentum = outer.step(anchor, momentum, aggregate(given, factors))
    nn.utils.vector_to_parameters(anchor, values)
    means = [sum(each) / rounds for each in seen]
    with torch.no_grad():
        loss = float(loss_of(model, teacher, 8192, torch.Generator().manual_seed(99)))
    return loss, means[-1] if lies else min(means)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=int, nargs="+", default=(4, 8, 16))
    parser.add_argument("--limit", type=float, nargs="+", default=(3.0, 2.0, 1.5))
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| peers | limit | one lies | all honest | without it | one is fast | cosines |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | --- |")
    for peers in options.peers:
        even = [_STEPS] * peers
        honest, least = train(options.rounds, 0, even, lies=False)
        without, _ = train(options.rounds, 0, even[1:], lies=False)
        for limit in options.limit:
            liar, cosine = train(options.rounds, limit, even, lies=True)
            uneven = [*[_STEPS // 5] * (peers - 1), _STEPS]
            fast, _ = train(options.rounds, limit, uneven, lies=False)
            found = " | ".join(f"{each:.2f}" for each in (liar, honest, without, fast))
            print(f"| {peers} | {limit:g} | {found} | {cosine:.2f}, {least:.2f} |", flush=True)


if __name__ == "__main__":
    main()

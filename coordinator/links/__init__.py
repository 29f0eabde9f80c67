"""Links between workers of one machine, as slow and shaky as asked for.

`asked` reads `--link`, and `network` chooses the means: `namespaces` (with `subnets`) shapes the
rate in the kernel and needs root, `relay` shapes everything in a process of its own (`process`) and
needs nothing. What the relay does to bytes is decided in `shaping` and done in `connection`.
"""

MEANS = ("auto", "namespaces", "relay")

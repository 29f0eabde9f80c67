"""Links between workers of one machine, as slow and shaky as `--link` says.

`network` reads the option and chooses the means: `namespaces` shapes the rate in the kernel and
needs root, `relay` shapes everything in a process of its own and needs nothing. What the relay
does to bytes is decided in `shaping`.
"""

MEANS = ("auto", "namespaces", "relay")

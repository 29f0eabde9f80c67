"""`murmur bench`: the presets, torchft and hivemind side by side on links of several speeds.

`asked` is what was asked for; `session` runs it in order: `ours` starts a swarm, `yardsticks`
another system, `budget` says how many steps a slow link allows. `rows` reads reports, `tables`
shows them, `series` and `picture` draw how the link is used; `outcome` leaves it all.
"""

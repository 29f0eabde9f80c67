"""The optional side of a swarm: workers started on one machine, introductions, and reports.

Nothing here is on the data path or imports torch; training goes on without any of it.

Workers say what they do in events. `records` keeps what is known of each worker, `notes` picks the
events worth a line, and `progress` shows both while training goes on. At the end `results` leaves
what `report` puts together, `curve` draws and `printed` prints.

Two sources feed them. `swarm` plans worker processes, and `supervisor` runs them to their end
(`processes`, `leash`). `server` serves the Coordinator of the wire contract, whose decisions are in
`registry` (over `manifest` and `documents`). `status` asks any peer. `cli` holds the commands.
"""

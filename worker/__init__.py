"""The daemon that each machine runs: a train thread, an I/O thread, and a mailbox between them.

docs/architecture.md has a fragment's journey through the files. `daemon` starts and ends the whole.
"""

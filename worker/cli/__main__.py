"""`python -m worker.cli` is `murmur`."""

from worker.cli import main

main()

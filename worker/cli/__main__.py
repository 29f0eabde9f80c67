"""`python -m murmuration.worker.cli` is `murmur`."""

from murmuration.worker.cli import main

main()

"""`python -m coordinator` is `murmur coordinator`."""

from coordinator.cli import coordinator

if __name__ == "__main__":
    coordinator(prog_name="murmur coordinator")

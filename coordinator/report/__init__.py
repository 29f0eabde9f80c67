"""Reports and terminal views of a run."""

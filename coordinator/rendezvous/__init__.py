"""The coordinator: introduces peers, keeps the time series."""

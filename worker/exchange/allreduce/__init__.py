"""The leaderless mean: contributors, reducers, and the final average of a run in pairs."""

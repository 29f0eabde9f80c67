"""Rounds in pairs and small groups."""

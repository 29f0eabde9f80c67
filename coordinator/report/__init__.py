"""What a run came to, as lines, tables and curves."""

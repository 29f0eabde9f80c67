"""Text from elsewhere, made fit to be shown: short, and without control codes."""

MAX_SHOWN = 80


def shown(text: str, most: int = MAX_SHOWN) -> str:
    """At most `most` characters; what a terminal could take for a command becomes `?`."""
    cut = text if len(text) <= most else f"{text[: most - 3]}..."
    return cut if cut.isprintable() else "".join(c if c.isprintable() else "?" for c in cut)

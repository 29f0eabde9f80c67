"""Text from elsewhere, made fit to be shown: short, and without control codes."""

MAX_SHOWN = 80


def shown(text: str, most: int = MAX_SHOWN) -> str:
    """At most `most` characters; what a terminal could take for a command becomes `?`."""
    cut = text if len(text) <= most else f"{text[: most - 3]}..."
    return cut if cut.isprintable() else "".join(c if c.isprintable() else "?" for c in cut)


def is_utf8(text: str) -> bool:
    """Whether it can be told to others: a path of another encoding, as Python reads it, cannot."""
    return text == text.encode(errors="replace").decode()

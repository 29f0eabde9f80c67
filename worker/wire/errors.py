"""What a message from the network may turn out to be."""


class WireError(ValueError):
    """A message that does not fit this run; says what and where."""


class Again(WireError):
    """Sending it again may help: bytes were changed or lost on the way, or it came too early."""

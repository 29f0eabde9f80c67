"""How visits end that do not come back with a gradient."""


class Dropped(Exception):
    """The microbatch is lost from here on; the message says why."""


class Elsewhere(Exception):
    """Not here: another replica may do it."""

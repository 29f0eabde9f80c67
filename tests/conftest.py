"""What all tests share: nothing of theirs is kept in the home of whoever runs them."""

import os
import tempfile

_state = tempfile.TemporaryDirectory(prefix="murmur-tests-")
os.environ["XDG_STATE_HOME"] = _state.name

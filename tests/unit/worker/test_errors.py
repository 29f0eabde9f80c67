import pytest

from worker import errors
from worker.cli import exit_code_of
from worker.tasks import TaskError, TextError
from worker.transport import AddressInUse, Unreachable


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.MurmurError("x"), 1),
        (errors.ConfigError("x"), 3),
        (TaskError("x"), 4),
        (TextError("x"), 4),
        (errors.ManifestRefused("x"), 5),
        (errors.PeersUnreachable("x"), 6),
        (AddressInUse("x"), 7),
        (errors.CheckpointError("x"), 8),
        (Unreachable("x"), None),
        (ValueError("x"), None),
        (KeyError("x"), None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_an_error_for_the_user_has_its_exit_code_and_a_defect_has_none(
    error: Exception, code: int | None
) -> None:
    assert exit_code_of(error) == code


def test_the_documented_codes_are_those_of_the_classes() -> None:
    assert errors.__doc__ is not None
    for kind in errors.MurmurError.__subclasses__():
        assert f"    {kind.__name__:<20}{kind.exit_code} " in errors.__doc__

"""Spoiled messages of every kind, to live nodes and to every reader of bytes from elsewhere."""

import random
from contextlib import suppress

import pytest
from hypothesis import given, strategies as st

from tests.protocol.virtual_time import run
from tests.support.fuzz import SWARMS, spoiled, swarm_under_fire
from tests.support.fuzz_readers import READERS

EXECUTIONS = {"means": 300, "pairs": 300, "stages": 350}
ANSWERED = {
    "means": ("Control/Gossip", "Data/Exchange"),
    "pairs": ("Control/Gossip", "Data/PairRound"),
    "stages": ("Control/Gossip", "Control/Finished", "Data/StageCall"),
}


@pytest.mark.parametrize("kind", SWARMS)
def test_spoiled_requests_and_answers_are_refused_and_training_goes_on(kind):
    fuzz = run(swarm_under_fire(kind, random.Random(kind), EXECUTIONS[kind]))
    assert fuzz.defects == []
    assert {f"{method} answer" for method in ANSWERED[kind]} <= fuzz.executions.keys()
    assert fuzz.executions.total() > EXECUTIONS[kind]


@pytest.mark.parametrize("name", READERS)
@given(seed=st.integers(0, 2**32), garbage=st.binary(max_size=200))
def test_spoiled_bytes_end_in_the_documented_error(name, seed, garbage):
    reader = READERS[name]
    for raw in (garbage, spoiled(random.Random(seed), reader.samples, reader.kind)):
        with suppress(*reader.errors):
            reader.read(raw)

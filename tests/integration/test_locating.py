"""A worker behind a slow link is named by the others, and nobody else is."""

import json
from pathlib import Path
from typing import Any

from murmuration.algorithms.link import parse_link
from murmuration.coordinator.link_network import RelayProcess
from tests.support.workers import SMALL, running_swarm, settings_of

PACE = settings_of(run__steps=2_000_000, diloco__inner_steps=20)


def located(event: dict[str, Any]) -> bool:
    return event["event"] == "located" and event["found"]


def test_a_slow_link_is_located_by_the_others(tmp_path: Path) -> None:
    with running_swarm(3, tmp_path, *SMALL, *PACE) as swarm:
        links = dict.fromkeys(swarm.names, "16mbit") | {"w2": "2mbit"}
        members = {name: (swarm.addresses[name], parse_link(links[name])) for name in swarm.names}
        with RelayProcess(members, log_path=tmp_path / "relay.log") as relay:
            for name in swarm.names:
                swarm.start(name, "--proxy", relay.proxies[name])
            event = swarm.workers["w0"].wait_for(located, "fault located")
            status = swarm.status("w0")
        found = [event["verdict"], *status["verdicts"]]
        assert {each["peer"] for each in found} == {"w2"}
        assert {each["kind"] for each in found} <= {"uplink", "downlink"}
        for each in found:
            assert each["measured"] < 4.0 < each["usual"]
            assert 0.02 < each["cost"] <= 1.0
        assert set(status["measured"]["received"]) == {"w1", "w2"}
        logged = [
            json.loads(line) for line in (tmp_path / "w0/events.jsonl").read_text().splitlines()
        ]
        assert event in logged

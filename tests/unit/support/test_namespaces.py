"""What is chosen and removed, without making a namespace."""

import pytest

from tests.support import namespaces
from tests.support.namespaces import free_subnet, leftovers, names, started, why_not


def test_a_subnet_is_free_of_all_routes() -> None:
    assert str(free_subnet(["None/0", "0.0.0.0/1"])) == "198.18.0.0/24"
    taken = ["198.18.0.0/24", "198.18.1.7/32", "fd00::/8"]
    assert str(free_subnet(taken)) == "198.18.2.0/24"
    assert str(free_subnet(["198.16.0.0/12"])) == "10.192.0.0/24"
    all_of_them = ["198.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12"]
    assert free_subnet(all_of_them) is None


def test_only_what_a_dead_process_left_is_removed() -> None:
    stem, host_end = names(3)
    assert len(host_end) <= 15
    mine, pid = f"{stem}-hub", stem.split("-")[1]
    recycled = f"murmur-{pid}-{(started(int(pid)) or 0) + 1}-5-m0"  # the pid came again
    dead = "murmur-999999999-12-0-hub"
    others = ["cni-1", "murmur-x-1-0-hub", "murmur-1"]
    assert list(leftovers([mine, recycled, dead, *others])) == [
        (recycled, f"mm{pid}-5"),
        (dead, "mm999999999-0"),
    ]


@pytest.mark.parametrize("capabilities", [0, 1 << 12, 1 << 21])
def test_without_the_capabilities_nothing_is_tried(
    capabilities: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(namespaces, "_capabilities", lambda: capabilities)
    monkeypatch.setattr("sys.platform", "linux")
    assert why_not() == ("network namespaces need root (CAP_NET_ADMIN and CAP_SYS_ADMIN)")

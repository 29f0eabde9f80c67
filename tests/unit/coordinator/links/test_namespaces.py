"""What is chosen and removed, without making a namespace."""

from coordinator.links.namespaces import free_subnet, leftovers, names, started


def test_a_subnet_is_free_of_all_routes() -> None:
    assert str(free_subnet([{"dst": "default"}, {"dst": "0.0.0.0/1"}])) == "198.18.0.0/24"
    taken = [{"dst": "198.18.0.0/24"}, {"dst": "198.18.1.7"}, {"dst": "fd00::/8"}]
    assert str(free_subnet(taken)) == "198.18.2.0/24"
    assert str(free_subnet([{"dst": "198.16.0.0/12"}])) == "10.192.0.0/24"
    all_of_them = [{"dst": "198.0.0.0/8"}, {"dst": "10.0.0.0/8"}, {"dst": "172.16.0.0/12"}]
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

"""Limits the rate of what this network namespace sends, as a container does with its link.

    python shape.py 20mbit

Needs CAP_NET_ADMIN. Of a link only the rate counts.
"""

import sys
from typing import Any

from pyroute2 import IPRoute

from murmuration.algorithms.link import Link, parse_link

_BURST_S = 0.005  # of the rate: what a bucket may send at once after a pause
_LEAST_BURST_BYTES = 3_200  # two full packets
_QUEUE_S = 0.1  # of the rate: packets that wait, as in a home router
_LEAST_QUEUE_BYTES = 48_000
_MOST_BYTES_S = 2**32 - 1  # as the kernel counts them


def bucket(link: Link) -> tuple[int, int, int]:
    """Rate (bytes/s), burst and limit (bytes) of a token bucket (`tbf`) for a link."""
    rate_bytes_s = link.rate_mbps * 1e6 / 8
    burst = max(_LEAST_BURST_BYTES, round(rate_bytes_s * _BURST_S))
    queue = burst + max(_LEAST_QUEUE_BYTES, round(rate_bytes_s * _QUEUE_S))
    return min(round(rate_bytes_s), _MOST_BYTES_S), burst, queue


def shape(namespace: Any, index: int, link: Link) -> None:
    """Puts such a bucket before what an interface sends. Args: index: of the interface."""
    rate, burst, limit = bucket(link)
    namespace.tc("add", "tbf", index, rate=rate, burst=burst, limit=limit)


def main(text: str) -> None:
    link = parse_link(text)
    with IPRoute() as here:
        for each in here.get_links():
            if each.get_attr("IFLA_IFNAME") != "lo":
                shape(here, each["index"], link)


if __name__ == "__main__":
    main(sys.argv[1])

"""How fast one core encodes and decodes, in how many bits, and how well.

    python -m tests.lab codecs [--mbytes 64] [--repetitions 7] [--codec NAME ...]

Gaussian values, in blocks as the worker codes them. Medians of the thread's own time, since the
machine is shared. Rates are in fp32 bytes. The error is the root of the mean square over that of
the values; zstd is the payload's size over its size after zstd at level 1.

Asked of every codec: at least 0.8 GB/s of fp32 encoded by a core, and 0.5 decoded.
Fails where one is slower. Other load takes its share of the cache, so ask an idle machine.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import zstandard
from torch import Tensor

from murmuration.algorithms.codecs import CODECS, Codec, codec_by_name
from murmuration.worker.wire import BLOCK_ELEMENTS, bytes_tensor

SEED = 1
ENCODED, DECODED = 0.8, 0.5  # GB/s, the least


@dataclass(frozen=True)
class Speed:
    """GB/s of fp32 on one core."""

    encoded: float
    decoded: float

    @property
    def is_enough(self) -> bool:
        """Whether it is what is asked of a codec."""
        return self.encoded >= ENCODED and self.decoded >= DECODED


def median_rate(work: Callable[[], None], values: Tensor, repetitions: int) -> float:
    """GB/s of fp32, the first run left out."""
    took_s = []
    for _ in range(repetitions + 1):
        started = time.thread_time()
        work()
        took_s.append(time.thread_time() - started)
    return values.numel() * 4 / statistics.median(took_s[1:]) / 1e9


def measure(codec: Codec, values: Tensor, repetitions: int) -> tuple[str, Speed]:
    """One row of the table, and what stands there."""
    elements = values.numel()
    payload = bytes_tensor(memoryview(bytearray(codec.encoded_bytes(elements))))
    decoded = torch.empty_like(values)
    bounds = [
        (start, min(elements, start + BLOCK_ELEMENTS))
        for start in range(0, elements, BLOCK_ELEMENTS)
    ]
    at = {edge: codec.encoded_bytes(edge) for pair in bounds for edge in pair}

    def encode() -> None:
        for start, stop in bounds:
            payload[at[start] : at[stop]] = codec.encode(values[start:stop])

    def decode() -> None:
        for start, stop in bounds:
            decoded[start:stop] = codec.decode(payload[at[start] : at[stop]], stop - start)

    encoded = median_rate(encode, values, repetitions)
    speed = Speed(encoded, median_rate(decode, values, repetitions))
    raw = payload.numpy().tobytes()
    zstd = len(raw) / len(zstandard.ZstdCompressor(level=1).compress(raw))
    error = ((decoded - values).norm() / values.norm()).item()
    row = (
        f"{codec.name:7} {len(raw) * 8 / elements:8.4f} {speed.encoded:8.2f} "
        f"{speed.decoded:8.2f} {error:10.2e} {zstd:6.3f}"
    )
    return row, speed


def main() -> int:
    """Prints the table; 1 where a codec is slower than is asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mbytes", type=int, default=64, help="MB of fp32")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--codec", nargs="*", default=[codec.name for codec in CODECS])
    options = parser.parse_args()
    torch.set_num_threads(1)
    values = torch.randn(
        options.mbytes * 1_000_000 // 4, generator=torch.Generator().manual_seed(SEED)
    )
    copy = torch.empty_like(values)
    rate = median_rate(lambda: [copy.copy_(values)].clear(), values, options.repetitions)
    print(
        f"{options.mbytes} MB of gaussian fp32, one thread, medians; a plain copy: {rate:.2f} GB/s"
    )
    print("codec       bits   encode   decode      error   zstd   (GB/s of fp32)")
    slow = list[str]()
    for name in options.codec:
        row, speed = measure(codec_by_name(name), values, options.repetitions)
        print(row, flush=True)
        slow += [] if speed.is_enough else [name]
    verdict = f"MISSED by {', '.join(slow)}" if slow else "kept"
    print(f"at least {ENCODED} GB/s encoded and {DECODED} decoded: {verdict}")
    return 1 if slow else 0


if __name__ == "__main__":
    raise SystemExit(main())

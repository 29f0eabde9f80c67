"""The final report for people."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from murmuration.coordinator.report import Report
from murmuration.protos import figures
from murmuration.protos.events import Curve, verdict_words
from murmuration.protos.exit_codes import exit_words
from murmuration.protos.figures import count, measured, megabytes, ratio, size
from murmuration.worker.views.summary import drawn_table, known, known_columns

_NATS = "nats per "
_BLOCKS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 40
_MAX_SAMPLE_LINES = 24
_WIDE = 100  # columns of a terminal
_NOT_KNOWN = "not known: no worker reported to the end"
_LOCAL = "differ, as they must: with preset local nothing is exchanged"
_WORTH_A_WORD_S = 0.05
_WORTH_A_WORD_BYTES = 100_000


def print_report(report: Report, console: Console) -> None:
    """Prints headline figures, a row per worker, a sample, and where everything is."""
    console.print()
    console.print(Text(_headline(report), style="bold"))
    console.print()
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    agree = "green" if report["hashes_agree"] else "bold red"
    differ = report["preset"] == "local" or report["spread"] is not None  # as they must
    if report["hashes_agree"] is None or differ:
        agree = ""
    for label, value in figure_lines(report):
        grid.add_row(label, Text(value, style=agree if label == "replicas" else ""))
    console.print(Padding(grid, (0, 0, 0, 2), expand=False))
    narrow = console.width < _WIDE
    heads, rows = known_columns(_COLUMNS | (_NARROW if narrow else {}), report["peers"])
    align = "".join("<" if head in ("worker", "anchor", "end") else ">" for head in heads)
    console.print(drawn_table(heads, rows, align, collapse_padding=narrow, pad_edge=not narrow))
    if report["sample"]:
        console.print(Text("A sample of what it writes", style="dim"))
        lines = str(report["sample"]).expandtabs(4).splitlines()[:_MAX_SAMPLE_LINES]
        for line in lines:
            console.print(Text(f"  | {line}"), overflow="ellipsis", no_wrap=True)
        console.print()
    for label, key in (("checkpoint", "checkpoint"), ("loss curve", "loss_png"), ("report", "out")):
        if report.get(key):  # paths stay in one piece, to be copied
            console.print(Text(f"{label:<11} {report[key]}"), soft_wrap=True)


# A dash where a worker ended before it could say, or cannot be asked.
_COLUMNS: dict[str, Callable[[Mapping[str, Any]], str | None]] = {
    "worker": lambda peer: peer["peer"],
    "stage": lambda peer: known(peer.get("stage"), str),
    "steps": lambda peer: known(peer["steps"], "{:,}".format),
    "rounds": lambda peer: known(peer["rounds_completed"], str),
    "sent": lambda peer: known(peer["bytes_sent"], megabytes),
    "received": lambda peer: known(peer["bytes_received"], megabytes),
    "computing": lambda peer: known(
        peer["compute_utilization"], lambda share: figures.percent(share, 0)
    ),
    "stalled": lambda peer: known(peer["stall_s"], "{:.1f} s".format),
    "anchor": lambda peer: (peer["anchor_hash"] or "")[:12],
    "end": lambda peer: known(peer["exit_code"], exit_words) or str(peer["state"]),
}
_NARROW: dict[str, Callable[[Mapping[str, Any]], str | None]] = {
    "received": lambda peer: None,
    "anchor": lambda peer: (peer["anchor_hash"] or "")[:6],
}


def _headline(report: Report) -> str:
    parts = [str(report["preset"] or "run"), count(report["workers"], "worker")]
    if "stages" in report:
        parts.append(count(report["stages"]["count"], "stage"))
    if steps := report["steps"]:
        whole, reached = count(steps, "inner step"), report["step"]
        parts.append(whole if reached >= steps else f"{reached:,} of {whole}")
    if report["inner_steps"]:
        parts.append(f"a round every {count(report['inner_steps'], 'step')}")
    if report["params"]:
        parts.append(figures.parameters(report["params"]))
    return " · ".join(parts)


def figure_lines(report: Report) -> list[tuple[str, str]]:
    """(label, value) of each headline figure; what nobody reported stands as not known."""
    lag, link = report["loop_lag_ms"], report.get("link")
    lags = ", ".join(f"{key} {lag[key]:.1f} ms" for key in ("p50", "p99", "max") if key in lag)
    lines: list[tuple[str, str | None]] = [
        ("validation loss", _validation(report)),
        ("on the way", _curve(report["val_loss_curve"])),
        ("training loss", _curve(report["train_loss_curve"])),
        ("bytes sent", _traffic(report)),
        ("probes", _probes(report)),
        ("final mean", _final_mean(report)),
        ("links", link and f"{link} each way"),
        ("bits per value", _bits(report)),
        ("computing", _computing(report)),
        *(_stage_lines(report).items() if "stages" in report else ()),
        ("waited for", _waits(report)),
        *(("slow", verdict_words(verdict)) for verdict in report["verdicts"]),
        *(("warning", text) for text in report.get("warnings", ())),
        ("rounds", _rounds(report)),
        ("replicas", _replicas(report)),
        ("loop lag", f"{lags} (slowest worker)" if lags else None),
    ]
    return [(label, value) for label, value in lines if value]


def _curve(curve: Curve) -> str | None:
    """Its ends, and between them the whole in one line of text, on a logarithmic scale."""
    if not curve:
        return None
    values = [math.log(max(loss, 1e-9)) for _, loss in curve]
    width = min(_SPARK_WIDTH, len(values))
    edges = [i * len(values) // width for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    drawn = "".join(_BLOCKS[round((mean - low) * scale)] for mean in means)
    return f"{curve[0][1]:.2f} {drawn} {curve[-1][1]:.2f}"


def _validation(report: Report) -> str:
    loss = report["val_loss"]
    if loss is None:
        stopped = report["reason"] not in (None, "finished")
        return f"not measured: {'stopped before the end' if stopped else 'no worker reported one'}"
    told = measured(loss, report["val_loss_error"])
    unit, metrics = report["loss_unit"], figures.listed(report["val_metrics"])
    if unit is None or not unit.startswith(_NATS):
        return " ".join(filter(None, (told, unit))) + metrics
    bits = f", {loss / math.log(2):.2f} bits per byte" if unit == "nats per byte" else ""
    return f"{told} {unit} (perplexity {figures.perplexity(loss)}{bits}){metrics}"


def _traffic(report: Report) -> str:
    """The bytes sent, with a model in stages for which purpose, and what DDP would have sent."""
    sent, times = report["bytes_sent_per_worker"], report["bytes_ratio"]
    if sent is None:
        return _NOT_KNOWN
    line, ddp = f"{megabytes(sent)} per worker", report["ddp_bytes_per_worker"]
    staged = "stages" in report
    if staged and (exchanged := report["stages"]["exchange_bytes_sent_per_worker"]) is not None:
        line += f", of which {size(exchanged)} to agree within stages"
    if not ddp or (staged and not times):
        return line
    line += f"; DDP {'there' if staged else 'in fp32'} would have sent {megabytes(ddp)}"
    if not times:
        return line
    compared = f"{ratio(times)} as much" if times >= 1 else f"{ratio(1 / times)} less"
    # As usual where the parameters are in bf16 too: half of it.
    halved = f"; in bf16 {ratio(times / 2)}" if times >= 2 and not staged else ""
    return f"{line}, {compared}{halved}"


def _probes(report: Report) -> str | None:
    sent = sum(peer.get("probe_bytes_sent") or 0 for peer in report["peers"])
    received = sum(peer.get("probe_bytes_received") or 0 for peer in report["peers"])
    if sent + received < _WORTH_A_WORD_BYTES:
        return None
    passed = f"{megabytes(received)} received and {megabytes(sent)} sent"
    return f"{passed}, not counted above: doctor, status, and rates that peers measure"


def _final_mean(report: Report) -> str | None:
    """The one mean that ends a run where replicas differ: its share of what stands beside it."""
    if not (sent := report.get("final_mean_bytes_per_worker")):
        return None
    told = f"exact, in fp32, of all replicas: {megabytes(sent)} of these bytes"
    if (flow := report["bits_per_value"].get("final_mean")) is not None:
        told += f", {flow['bits_travelled']:.2f} bits per value"
    if stall_s := report.get("final_mean_stall_s"):
        told += f"; {stall_s:.1f} s of the stall below"
    return told


def _bits(report: Report) -> str | None:
    parts = []
    for kind in ("contributions", "reductions"):
        if (flow := report["bits_per_value"].get(kind)) is not None:
            travelled, encoded = flow["bits_travelled"], flow["bits_encoded"]
            packed = f" ({encoded:.2f} before zstd)" if travelled < 0.995 * encoded else ""
            parts.append(f"{travelled:.2f} in {kind}{packed}")
    return ", ".join(parts)


def _waits(report: Report) -> str | None:
    """Names those that workers have waited for most, where it is worth a word."""
    if not report["longest_stalls"] or (report["stall_s"] or 0) < _WORTH_A_WORD_S:
        return None
    by_peer = sorted(report["stall_s_by_peer"].items(), key=lambda item: -item[1])
    total = ", ".join(f"{peer} {seconds:.1f} s" for peer, seconds in by_peer[:4])
    longest = (
        "{stall_s:.2f} s, {peer} for round {round} of fragment {fragment} from {waited_for}"
    ).format_map(report["longest_stalls"][0])
    return f"{total}; longest {longest}"


def _computing(report: Report) -> str:
    utilization, wall_s = report["compute_utilization"], report["wall_s"]
    if utilization is None or wall_s is None:
        return _NOT_KNOWN
    share = (
        f"{100 * utilization:.1f} % of the {figures.duration(wall_s)} from first to last inner step"
    )
    return f"{share}; {report['stall_s'] or 0:.1f} s stalled on average"


def _rounds(report: Report) -> str:
    failed, last = report["rounds_failed"], report.get("final_mean_rounds")
    final = f" ({last} of the final mean)" if last else ""
    line = f"{report['rounds_completed']} completed{final}, {failed or 'none'} failed"
    if lost := report.get("steps_lost"):
        line += f"; {count(lost, 'inner step')} lost, since values were not finite"
    if tau := report["most_overlap_steps"]:  # where it is measured
        line += f", up to {count(tau, 'step')} on their way"
    if (fragments := report.get("fragments") or 1) > 1:
        line += f"; each exchanges one of {fragments} fragments of the model"
    return line


def _replicas(report: Report) -> str:
    if "stages" in report:
        return _staged_replicas(report["stages"], report["preset"])
    ended_at = [peer["step"] for peer in report["peers"] if peer["anchor_hash"]]
    reported = len(ended_at)
    if report["hashes_agree"] is None:
        return f"nothing to compare: {count(reported, 'worker')} reported to the end"
    if report["hashes_agree"]:
        return f"all {reported} that reported hold identical anchors and momenta, bit for bit"
    if report["preset"] == "local":
        return _LOCAL
    if report["spread"] is not None:
        apart = f"{100 * report['spread']:.2g} % from the mean of their pair"
        return f"{apart} when they last met; diloco.consensus=true ends with one"
    if len({*ended_at}) > 1:
        return f"not to be compared: the {reported} that reported ended at different steps"
    return f"DIFFER: the {reported} that reported do not hold the same anchor and momentum"


_TROUBLE = (
    ("rerouted", "visit", "re-routed to another replica"),
    ("skipped", "visit", "sent past a stage without replicas"),
    ("dropped", "microbatch", "dropped"),
    ("lost", "visit", "lost with a replica"),
    ("unconfirmed", "visit", "left unconfirmed by a worker that did not report"),
    ("discarded", "iteration", "of a stage discarded"),
)


def _stage_lines(report: Report) -> dict[str, str]:
    """How microbatches have gone, by label; nothing of what nobody reported."""
    stages, counts, rest = report["stages"], report["stages"]["counts"], report["stages"]["rest"]
    lines = {}
    if rest is not None:
        lines["the rest"] = (
            f"{100 * rest['microbatches']:.1f} % waiting for microbatches, "
            f"{100 * rest['rounds']:.1f} % for rounds, {100 * rest['other']:.1f} % other"
        )
    if stages["routing"] is not None:
        skip = f", {100 * stages['skip']:.0f} % of the stages left out" if stages["skip"] else ""
        begun = f"{count(stages['microbatches'], 'microbatch')} an iteration"
        lines["routes"] = f"{stages['routing']}{skip}; {begun} from each of stage 0"
    if None not in (stages["iteration_s"], stages["iteration_p95_s"]):
        late = f"{stages['iteration_p95_s']:.2f} s at the 95th percentile"
        lines["iteration"] = f"{stages['iteration_s']:.2f} s in the median, {late}"
    if (sent := stages["activation_bytes_per_iteration"]) is not None:
        lines["activations"] = f"{size(sent)} per worker and iteration, gradients included"
    if (peak := stages["in_flight_peak_bytes"]) is not None:
        limit = size(stages["in_flight_limit_bytes"])
        lines["in flight"] = f"at most {size(peak)} of the {limit} that visits may hold"
    trouble = [f"{count(counts[k], noun)} {words}" for k, noun, words in _TROUBLE if counts[k]]
    lines["microbatches"] = ", ".join(trouble)
    if stages["moves"]:
        made = f", {count(stages['rebuilds'], 'stage')} rebuilt" if stages["rebuilds"] else ""
        lines["moves"] = f"{count(stages['moves'], 'move')} of a worker to another stage{made}"
    if report["checkpoint"] is None and any(peer["checkpoint"] for peer in report["peers"]):
        lines["checkpoints"] = "of single stages; `murmur assemble` makes one of a run's"
    return lines


def _staged_replicas(stages: dict[str, Any], preset: str | None) -> str:
    by_stage: Sequence[dict[str, Any]] = stages["by_stage"]
    several = [stage for stage in by_stage if stage["hashes_agree"] is not None]
    differing = [stage for stage in several if not stage["hashes_agree"]]
    if not several:
        return "nothing to compare: no stage has two that reported to the end"
    if not differing:
        if len(several) == stages["count"]:
            return f"equal within each of {count(stages['count'], 'stage')}, bit for bit"
        return f"equal within {_named(several)}, bit for bit; of the others one or none reported"
    if preset == "local":
        return _LOCAL
    if paired := [stage for stage in by_stage if stage["spread"] is not None]:
        apart = ", ".join(f"{100 * s['spread']:.2g} % in stage {s['stage']}" for s in paired)
        return (
            f"from the mean of their pair when they last met: {apart}; "
            "diloco.consensus=true ends with one"
        )
    return f"DIFFER within {_named(differing)}: not the same anchor and momentum"


def _named(stages: Sequence[dict[str, Any]]) -> str:
    """`stage 1`, `stages 0 and 2`."""
    *others, last = [str(stage["stage"]) for stage in stages]
    return f"stages {', '.join(others)} and {last}" if others else f"stage {last}"

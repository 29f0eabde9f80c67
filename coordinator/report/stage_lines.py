"""The printed report's lines about a model in stages."""

from collections.abc import Sequence
from typing import Any

from protos.figures import count, megabytes, ratio, size

Stages = dict[str, Any]

_TROUBLE = (
    ("rerouted", "visit", "re-routed to another replica"),
    ("skipped", "visit", "sent past a stage without replicas"),
    ("dropped", "microbatch", "dropped"),
    ("lost", "visit", "lost with a replica"),
    ("unconfirmed", "visit", "left unconfirmed by a worker that did not report"),
    ("discarded", "iteration", "of a stage discarded"),
)


def traffic(report: dict[str, Any]) -> str:
    """What was sent for which purpose, and what DDP would have sent within the stages."""
    stages, sent = report["stages"], report["bytes_sent_per_worker"]
    if sent is None:
        return "not known: no worker reported to the end"
    line, exchanged = f"{megabytes(sent)} per worker", stages["exchange_bytes_sent_per_worker"]
    if exchanged is None:
        return line
    line += f", of which {size(exchanged)} to agree within stages"
    if not report["bytes_ratio"]:
        return line
    times = report["bytes_ratio"]
    compared = f"{ratio(times)} as much" if times >= 1 else f"{ratio(1 / times)} less"
    return (
        f"{line}; DDP there would have sent {megabytes(report['ddp_bytes_per_worker'])}, {compared}"
    )


def stage_lines(report: dict[str, Any]) -> list[tuple[str, str]]:
    """(label, value) of how microbatches have gone; nothing of what nobody reported."""
    stages, lines = report["stages"], []
    if (rest := stages["rest"]) is not None:
        waits = f"{100 * rest['microbatches']:.1f} % waiting for microbatches"
        waits += f", {100 * rest['rounds']:.1f} % for rounds"
        lines.append(("the rest", f"{waits}, {100 * rest['other']:.1f} % other"))
    if stages["routing"] is not None:
        skip = f", {100 * stages['skip']:.0f} % of the stages left out" if stages["skip"] else ""
        begun = f"{count(stages['microbatches'], 'microbatch')} an iteration"
        lines.append(("routes", f"{stages['routing']}{skip}; {begun} from each of stage 0"))
    if stages["iteration_s"] is not None:
        late = f"{stages['iteration_p95_s']:.2f} s at the 95th percentile"
        lines.append(("iteration", f"{stages['iteration_s']:.2f} s in the median, {late}"))
    if stages["visit_bytes_per_iteration"] is not None:
        sent = size(stages["visit_bytes_per_iteration"])
        lines.append(("activations", f"{sent} per worker and iteration, gradients included"))
    if stages["in_flight_peak_bytes"] is not None:
        limit = size(stages["in_flight_limit_bytes"])
        peak = size(stages["in_flight_peak_bytes"])
        lines.append(("in flight", f"at most {peak} of the {limit} that visits may hold"))
    counts = stages["counts"]
    if parts := [
        f"{count(counts[key], noun)} {words}" for key, noun, words in _TROUBLE if counts[key]
    ]:
        lines.append(("microbatches", ", ".join(parts)))
    if stages["moves"]:
        moved = f"{count(stages['moves'], 'move')} of a worker to another stage"
        made = f", {count(stages['rebuilds'], 'stage')} made anew" if stages["rebuilds"] else ""
        lines.append(("moves", moved + made))
    if report["checkpoint"] is None and any(peer["checkpoint"] for peer in report["peers"]):
        lines.append(("checkpoints", "of single stages; `murmur assemble` makes one of a run's"))
    return lines


def replicas(stages: Stages, preset: str | None) -> str:
    """Whether those of each stage hold the same."""
    by_stage: Sequence[Stages] = stages["by_stage"]
    several = [stage for stage in by_stage if stage["hashes_agree"] is not None]
    if not several:
        return "nothing to compare: no stage has two that reported to the end"
    differing = [stage for stage in several if not stage["hashes_agree"]]
    if not differing:
        if len(several) == stages["count"]:
            return f"equal within each of {count(stages['count'], 'stage')}, bit for bit"
        return f"equal within {_named(several)}, bit for bit; of the others one or none reported"
    if preset == "local":
        return "differ, as they must: with preset local nothing is exchanged"
    if any(stage["spread"] is not None for stage in by_stage):
        apart = ", ".join(
            f"{100 * stage['spread']:.2g} % in stage {stage['stage']}"
            for stage in by_stage
            if stage["spread"] is not None
        )
        return (
            f"from the mean of their pair when they last met: {apart}; "
            "diloco.consensus=true ends with one"
        )
    return f"DIFFER within {_named(differing)}: not the same anchor and momentum"


def _named(stages: Sequence[Stages]) -> str:
    """`stage 1`, `stages 0 and 2`."""
    numbers = [str(stage["stage"]) for stage in stages]
    if len(numbers) == 1:
        return f"stage {numbers[0]}"
    return f"stages {', '.join(numbers[:-1])} and {numbers[-1]}"

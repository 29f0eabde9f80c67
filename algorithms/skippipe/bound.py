"""A lower bound of the iteration time, to say how good a schedule is."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from algorithms.skippipe.coverage import fewest_visits
from algorithms.skippipe.pipeline import Pipeline
from algorithms.skippipe.planner import Planner
from algorithms.skippipe.route import Rules


def lower_bound_s(pipeline: Pipeline, rules: Rules, origins: Sequence[int]) -> float:
    """The largest of three bounds, each of which leaves out what the others count.

    1. An origin holds at most its memory of microbatches, each for at least its best loop.
    2. An origin computes all of its own microbatches' forwards, losses and backwards.
    3. The replicas of a stage share its visits, between the first hop to and the last hop from it.

    Args:
        origins: of each microbatch of the iteration.

    Raises:
        ValueError: an origin from which no route leads through the stages.
    """
    costs = pipeline.costs
    visit_s = costs.forward_s + costs.backward_s
    planner = Planner(pipeline, rules)
    bounds = [0.0]
    for origin, microbatches in sorted(Counter(origins).items()):
        route = planner.best(origin, visited=rules.shortest)
        if route is None:
            raise ValueError(f"no route from peer {origin}, which is not on stage 0")
        waves = -(-microbatches // pipeline.memory[origin])
        bounds.append(waves * planner.loop_s(route))
        bounds.append(microbatches * float(visit_s[origin] + costs.loss_s[origin]))
    hops_s = costs.edge_s + np.diag(np.full(pipeline.peers, np.inf))
    ends_s = float(min(costs.forward_s[origin] + costs.backward_s[origin] for origin in origins))
    visits = fewest_visits(pipeline, rules, origins)
    for stage in pipeline.stages[1:]:
        replicas = list(stage)
        work_s = visits / float((1.0 / visit_s[replicas]).sum())
        there_s, back_s = hops_s[:, replicas].min(), hops_s[replicas, :].min()
        bounds.append(work_s + float(there_s + back_s) + ends_s)
    return max(bounds)


def uplink_bound_s(pipeline: Pipeline, rules: Rules, origins: Sequence[int]) -> float:
    """A lower bound of the iteration time with shared uplinks, beside `bound.lower_bound_s`.

    Every visit sends two messages: onward, and a gradient back; an origin sends the first hop and
    the gradient of the loss. Each takes the line for at least the time to the nearest other stage,
    between what must come before the first and after the last of them.

    Args:
        origins: of each microbatch of the iteration.
    """
    if rules.visited == 1:
        return 0.0
    costs = pipeline.costs
    stage = np.array(pipeline.stage_of)
    apart = stage[:, None] != stage[None, :]
    message_s = np.where(apart, costs.transfer_s, np.inf).min(axis=1)
    delay_s = np.where(apart, costs.delay_s, np.inf).min(axis=1)
    arrives_s = np.where(apart, costs.edge_s, np.inf).min(axis=0)
    begins_s = min(float(costs.forward_s[origin]) for origin in origins)
    ends_s = min(float(costs.backward_s[origin]) for origin in origins)
    bounds = []
    for origin, microbatches in Counter(origins).items():
        sends_s = 2 * microbatches * message_s[origin]
        # After its last message another stage's backward and the way back are still to come.
        back_s = delay_s[origin] + costs.backward_s[stage > 0].min() + arrives_s[origin]
        bounds.append(costs.forward_s[origin] + sends_s + back_s + costs.backward_s[origin])
    visits = fewest_visits(pipeline, rules, origins)
    for each in pipeline.stages[1:]:
        replicas = list(each)
        sends_s = visits / (1.0 / (2 * message_s[replicas])).sum() if visits else 0.0
        there_s = (arrives_s + costs.forward_s)[replicas].min()
        bounds.append(begins_s + there_s + sends_s + delay_s[replicas].min() + ends_s)
    return float(max(bounds))

"""Cuts: where linear runs end, so that a net with emptied sites costs least under a protocol.

A value at a cut is computed; values between cuts are merged into the maps to the next ones. Fewer
cuts are fewer maps with larger kernels, so the best cuts depend on the protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from heapq import nsmallest
from math import prod
from typing import NamedTuple

from torch import fx

from fastbcd.private.layers import Layer, product
from fastbcd.private.linear_runs import Kind, LinearRuns, Path, Value, joined

MOST_STATES = 100  # the cheapest ones are looked at further
Shape = tuple[int, ...]
Measure = Callable[[list[Layer]], float]
State = tuple[tuple[str, Value], ...]  # the values that are still read


class Cuts(NamedTuple):
    """Nodes at which runs end, and what the linear layers cost then."""

    nodes: frozenset[str]
    cost: float


def maps_to(
    shape: Shape, value: Value, shapes: Mapping[str, Shape], name: str = ""
) -> list[Layer]:
    """The layers that compute a value from its sources: a convolution from each, or one product.

    >>> from fastbcd.private.linear_runs import Span
    >>> path = Path(Kind.CONVOLVES, Span(2, 2), Span(2, 2))
    >>> maps_to((8, 6, 6), (("x", path),), {"x": (4, 6, 6)})[0].amounts["weights"]  # 8 * 4 * 5 * 5
    800
    """
    if value[0][1].kind == Kind.MIXES:
        terms = sum(prod(shapes[source]) for source, _ in value)
        return [product(name, 1, terms, prod(shape), inputs=terms)]
    layers = []
    for source, path in value:
        if path.kind == Kind.SCALES:
            layers.append(Layer(name, "line", {"units": prod(shape), "sites": 1}))
        if path.kind == Kind.CONVOLVES:
            terms = shapes[source][0] * path.rows.size * path.columns.size
            inputs = prod(shapes[source])
            layers.append(
                product(name, prod(shape[1:]), terms, shape[0], inputs=inputs)
            )
    return layers


class Cutting:
    """The cheapest cuts of a net for any set of sites in use; each set is looked at once.

    measure: the cost of a list of layers.

    >>> net = fastbcd.models.resnet20(num_classes=10, image_size=32)
    >>> cutting = Cutting(LinearRuns(net), lambda layers: len(layers))
    >>> cutting.best(frozenset())  # everything is one dense map
    Cuts(nodes=frozenset(), cost=1.0)
    """

    def __init__(self, runs: LinearRuns, measure: Measure) -> None:
        self.runs = runs
        self.best = lru_cache(None)(self._best)
        self.price = lru_cache(None)(
            lambda node, value: measure(maps_to(runs.shapes[node], value, runs.shapes))
        )
        order = {node.name: number for number, node in enumerate(runs.nodes)}
        self.last_use = {
            node.name: max((order[user.name] for user in node.users), default=-1)
            for node in runs.nodes
        }

    def _best(self, used: frozenset[str]) -> Cuts:
        """The cheapest cuts if these sites keep a ReLU.

        Values are computed in the order of the graph. Of all ways to the same values that are
        still read, as functions of the same sources, only the cheapest is followed.
        """
        states: dict[State, Cuts] = {(): Cuts(frozenset(), 0.0)}
        for number, node in enumerate(self.runs.nodes):
            after: dict[State, Cuts] = {}
            for state, choice in states.items():
                values = dict(state)
                for value, more in self._values(node, values, used, choice):
                    kept = {
                        name: v
                        for name, v in values.items()
                        if self.last_use[name] > number
                    }
                    if value:
                        kept[node.name] = value
                    key = tuple(kept.items())
                    if key not in after or more.cost < after[key].cost:
                        after[key] = more
            cheapest = nsmallest(
                MOST_STATES, after.items(), key=lambda item: item[1].cost
            )
            states = dict(cheapest)
        return min(states.values(), key=lambda choice: choice.cost)

    def _values(
        self,
        node: fx.Node,
        values: dict[str, Value],
        used: frozenset[str],
        choice: Cuts,
    ) -> Iterator[tuple[Value, Cuts]]:
        """What a node may be as a function of sources, with the cost up to there."""
        inputs = [
            source.name for source in node.all_input_nodes if source.name in values
        ]
        source: Value = ((node.name, Path()),)
        if not self.runs.is_linear(node, used):
            more = sum(self.price(name, values[name]) for name in inputs)
            if node.name not in self.runs.shapes:
                source = ()
            yield source, choice._replace(cost=choice.cost + more)
            return
        value = joined([values[name] for name in inputs], self.runs.paths[node.name])
        yield value, choice
        if self.runs.may_be_cut(node):
            if self.runs.is_mean(node):
                more = sum(self.price(name, values[name]) for name in inputs)
                more += self.price(node.name, ((node.name, Path(Kind.SCALES)),))
            else:
                more = self.price(node.name, value)
            yield source, Cuts(choice.nodes | {node.name}, choice.cost + more)

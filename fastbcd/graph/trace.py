"""What is done to a network's torch.fx graph before it is rewritten."""

from __future__ import annotations

import operator

from torch import fx, nn


def without_inplace(net: nn.Module, original: fx.Graph) -> fx.Graph:
    """A copy of the graph in which nothing overwrites its input: later readers read the result.

    Values then stay what they were, so that they can be read later than the net reads them.
    """
    graph = fx.Graph()
    done = graph.graph_copy(original, {}, return_output_node=True)
    assert isinstance(done, tuple)
    graph.output(done[0])
    pure = {operator.iadd: operator.add, operator.isub: operator.sub, operator.imul: operator.mul,
            operator.itruediv: operator.truediv}  # fmt: skip
    order = {n: i for i, n in enumerate(graph.nodes)}
    for node in graph.nodes:
        if node.target in pure:
            node.target = pure[node.target]
        elif node.op == "call_method" and node.target == "view":
            node.target = "reshape"  # values may lie in channels_last order
            continue
        elif node.op == "call_method" and str(node.target).endswith("_"):
            node.target = str(node.target)[:-1]
        elif node.op == "call_module" and getattr(net.get_submodule(node.target), "inplace", False):
            pass  # the caller takes care of the module itself
        elif node.kwargs.get("inplace"):
            node.update_kwarg("inplace", False)
        else:
            continue
        changed = node.args[0] if node.args else next(iter(node.kwargs.values()))
        if isinstance(changed, fx.Node):
            later = {user for user in changed.users if order[user] > order[node]}
            changed.replace_all_uses_with(node, delete_user_cb=later.__contains__)
    return graph

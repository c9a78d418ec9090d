"""The graph that `convert` rewrites: its tracer, the names of its calls, the change of a call."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import fx, nn

from fastbcd.graph.trace import Tracer


class LeafTracer(Tracer):
    """Calls the modules of the given paths as a whole."""

    def __init__(self, leaves: Collection[str] = ()) -> None:
        super().__init__()
        self.leaves = leaves

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        leaf = getattr(m, "is_traced_as_leaf", False) or module_qualified_name in self.leaves
        return leaf or super().is_leaf_module(m, module_qualified_name)


def owner_of(node: fx.Node) -> str:
    """The path of the module whose forward makes this call."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    if node.op == "call_module" and stack and stack[-1][0] == node.target:
        stack.pop()
    return stack[-1][0] if stack else ""


def call_path(node: fx.Node) -> str:
    """The path of the module that is called, or of the function called by its owner."""
    if node.op == "call_module":
        return str(node.target)
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "?")
    return ".".join(filter(None, [owner_of(node), target.strip("_")]))


def replace_call(
    net: nn.Module, node: fx.Node, module: nn.Module, *, source: fx.Node, inplace: bool,
    takes_name: bool = False, tensors: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """Call module(source, **tensors) instead of the node.

    The module is registered as call_path(node), or with _2, _3, ... if that is taken. takes_name:
    it replaces the module of that name.
    """
    path, graph = call_path(node), node.graph
    owner, _, leaf = path.rpartition(".")
    parent, number, name = net.get_submodule(owner), 1, leaf
    while not takes_name and hasattr(parent, name):
        number += 1
        name = f"{leaf}_{number}"
    parent.register_module(name, module)
    with graph.inserting_after(node):
        new = graph.call_module(".".join(filter(None, [owner, name])), (source,), tensors)
    new.meta = dict(node.meta)
    if inplace:
        # The new module does not change its input: later readers of the input read its output.
        later = {user for user in source.users if user > node}
        source.replace_all_uses_with(new, delete_user_cb=lambda user: user in later - {new})
    node.replace_all_uses_with(new)
    graph.erase_node(node)

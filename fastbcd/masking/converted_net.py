"""The class of the networks that `convert` returns."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, fx, nn
from torch.fx.graph_module import _USER_PRESERVED_ATTRIBUTES_KEY as KEPT

from fastbcd.masking.masks import plain_names


class ConvertedNet(fx.GraphModule):
    """A network as its graph, on the module tree of the original: every name and weight is kept.

    `original_class`, its class attributes and properties, attributes that are numbers, strings or
    lists of them, and methods that forward calls, such as forward_features, can be read from it.
    """

    @classmethod
    def of(cls, original: nn.Module, graph: fx.Graph) -> ConvertedNet:
        """The network that runs the graph; it takes over the modules of the original."""
        for node in graph.find_nodes(op="get_attr"):
            if isinstance(value := vars(original).get(node.target), Tensor):
                delattr(original, node.target)  # a tensor that forward makes is no state
                original.register_buffer(node.target, value, persistent=False)
        net = cls(original, graph, type(original).__name__)
        for name in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            setattr(net, name, getattr(original, name))
        net.register_load_state_dict_pre_hook(_strip_prefixes)
        own = {k: v for k, v in vars(original).items() if k[0] != "_" and not hasattr(net, k)}
        own.pop("arch", None)  # which is how `models.build` makes a net
        net.keep(
            original_class=getattr(original, "original_class", type(original)),
            _left_out={k: type(v).__name__ for k, v in own.items() if not _is_plain(v)},
            **{k: v for k, v in own.items() if _is_plain(v)},
        )
        return net

    def keep(self, **attributes: Any) -> None:
        """Set attributes that copy.deepcopy copies, too."""
        self.meta.setdefault(KEPT, {}).update(attributes)
        vars(self).update(attributes)

    def recompile(self) -> Any:
        code = super().recompile()
        del type(self).__call__  # torch.fx's own prints errors of the generated code to stderr
        return code

    def __reduce__(self) -> Any:
        make, (content, imports) = super().__reduce__()
        kept = {k: v for k, v in self.meta.get(KEPT, {}).items() if k != "original_class"}
        content.pop("original_class", None)  # a local class cannot be pickled
        return make, ({**content, "meta": {**self.meta, KEPT: kept}}, imports)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            original, left_out = vars(self).get("original_class"), vars(self).get("_left_out", {})
            if name in left_out:
                raise AttributeError(
                    f"the converted net has no {name!r}: numbers, strings and lists of them are "
                    f"copied, not a {left_out[name]}; read it from the model that was converted"
                ) from None
            if name[0] == "_" or name == "arch" or not hasattr(original, name):
                raise
        found = inspect.getattr_static(original, name)
        if isinstance(found, property) and found.fget:
            return found.fget(self)
        return self._method(name) if inspect.isfunction(found) else getattr(original, name)

    def _method(self, name: str) -> ConvertedNet:
        """The part of the graph that a method of the original computes, with the same modules."""
        starts, ends = ([n for n in self.graph.nodes if name in n.meta.get(key, ())]
                        for key in ("given to", "returned by"))  # fmt: skip
        needed: set[fx.Node] = set()
        todo = list(ends)
        while todo:
            if (node := todo.pop()) not in needed and node not in starts:
                needed.add(node)
                todo += node.all_input_nodes
        if len(starts) != 1 or len(ends) != 1 or any(n.op == "placeholder" for n in needed):
            raise AttributeError(
                f"the converted net has no {name!r}: {self.original_class.__name__}.forward does "
                f"not call it exactly once, with one tensor, for one tensor; call it on the model "
                f"that was converted"
            )
        graph = fx.Graph()
        values = {starts[0]: graph.placeholder("x")}
        for node in self.graph.nodes:
            if node in needed:
                values[node] = graph.node_copy(node, values.__getitem__)
        graph.output(values[ends[0]])
        return ConvertedNet(self, graph, name)


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _strip_prefixes(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Load a checkpoint of a wrapped model: prefixes that all its names have are removed."""
    if prefix == "" and not state_dict.keys() & module.state_dict().keys():
        own = {plain: key for key, plain in plain_names(module.state_dict()).items()}
        for key, plain in plain_names(state_dict).items():
            state_dict[own.get(plain, plain)] = state_dict.pop(key)

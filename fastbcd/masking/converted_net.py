"""The class of the networks that `convert` returns."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.graph_module import _USER_PRESERVED_ATTRIBUTES_KEY as KEPT


class ConvertedNet(fx.GraphModule):
    """A network as its graph, on the module tree of the original: every name and weight is kept.

    The public attributes of the original can be read from it.
    """

    @classmethod
    def of(cls, original: nn.Module, graph: fx.Graph) -> ConvertedNet:
        """The network that runs the graph; it takes over the modules of the original."""
        for node in graph.find_nodes(op="get_attr"):
            value = vars(original).get(node.target)
            if isinstance(value, Tensor):
                delattr(
                    original, node.target
                )  # a tensor that forward makes is no state
                original.register_buffer(node.target, value, persistent=False)
        net = cls(original, graph, type(original).__name__)
        for name in (
            "_modules",
            "_parameters",
            "_buffers",
            "_non_persistent_buffers_set",
        ):
            setattr(net, name, getattr(original, name))
        for name, value in vars(original).items():
            # `arch` is how `models.build` makes a net, which this one is not.
            if name[0] != "_" and name != "arch" and not hasattr(net, name):
                net.keep(name, value)
        return net

    def keep(self, name: str, value: Any) -> None:
        """Set an attribute that copy.deepcopy copies, too."""
        self.meta.setdefault(KEPT, {})[name] = value
        vars(self)[name] = value

    def __call__(self, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        """What forward returns; with labels, class indices, and its loss, as in transformers."""
        output = super().__call__(*args, **kwargs)
        if labels is None:
            return output
        if not (hasattr(output, "logits") and hasattr(output, "loss")):
            raise TypeError(
                "this net takes no argument labels=: its output has no logits and loss"
            )
        if labels.is_floating_point():
            raise TypeError(
                f"labels= are {labels.dtype}, not class indices: use output.logits"
            )
        return dataclasses.replace(output, loss=F.cross_entropy(output.logits, labels))

    def recompile(self) -> Any:
        code = super().recompile()
        del type(
            self
        ).__call__  # torch.fx's own prints errors of the generated code to stderr
        return code

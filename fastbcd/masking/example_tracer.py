"""A torch.fx tracer for inputs like an example: Python may ask for sizes, types and branches."""

from __future__ import annotations

import functools
import inspect
import operator
import threading
from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fastbcd.graph.trace import Tracer


class ExampleProxy(fx.Proxy):
    """A traced value; where Python needs its size, number or truth, the example input gives it."""

    tracer: ExampleTracer

    def __getattr__(self, k: str) -> ExampleAttribute:
        return ExampleAttribute(self, k)

    def known(self, kind: Callable[[Any], Any]) -> Any:
        """kind(this value)."""
        return self.tracer.known(self.node, kind)

    __len__ = functools.partialmethod(known, len)
    __index__ = functools.partialmethod(known, operator.index)
    __int__ = functools.partialmethod(known, int)
    __float__ = functools.partialmethod(known, float)


class ExampleAttribute(ExampleProxy, fx.proxy.Attribute):
    """An attribute of a traced value, such as its shape."""


class ExampleTracer(Tracer):
    """Traces forward(x), other arguments at their defaults, for inputs like the example.

    Control flow may depend on the shape and the type of x, except for the batch size, and on the
    weights as they are. Modules of the paths `leaves` are called as a whole.
    """

    proxy_buffer_attributes = True  # 2 * self.buffer follows the buffer

    def __init__(self, example: Tensor, leaves: Collection[str]) -> None:
        super().__init__()
        self.example = example
        self.leaves = leaves
        self.fake = FakeTensorMode(
            allow_non_fake_inputs=True
        )  # shapes and types without data
        # The values of nodes, for several batch sizes.
        self.values: dict[int, dict[fx.Node, Any]] = {
            n: {} for n in (len(example), 2, 3, 1009)
        }
        self.varying: set[fx.Node] = set()  # the nodes that depend on x

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        leaf = module_qualified_name in self.leaves
        return leaf or super().is_leaf_module(m, module_qualified_name)

    def getattr(
        self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]
    ) -> Any:
        if attr == "num_batches_tracked":  # a count, which is no part of the graph
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        """The graph; a call of an autograd Function is one node, which keeps its own gradient."""
        function: Any = torch.autograd.Function
        original = vars(function)["apply"]
        function.apply = classmethod(functools.partial(self._apply, original.__func__))
        try:
            return super().trace(root, concrete_args)
        finally:
            function.apply = original

    def _apply(self, apply: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
        traced = any(isinstance(a, fx.Proxy) for a in (*args, *kwargs.values()))
        if not traced or any(
            map(inspect.isroutine, args)
        ):  # such as checkpoint(function, x)
            return apply(cls, *args, **kwargs)
        return self.create_proxy("call_function", _caller(cls), args, kwargs)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return ExampleProxy(node, self)

    def to_bool(self, obj: fx.Proxy) -> bool:
        return self.known(obj.node, bool)

    def iter(self, obj: Any) -> Any:
        return iter([obj[i] for i in range(self.known(obj.node, len))])

    def known(self, node: fx.Node, kind: Callable[[Any], Any]) -> Any:
        """kind(value of the node), which neither the data nor the batch size may decide."""
        answers = set()
        failure = None
        self.thread = 0  # calls of another thread are not traced
        for batch in self.values:
            try:
                answers.add(kind(self._value(node, batch)))
            except Exception as error:  # such as a size that the net does not run on
                failure = error
        self.thread = threading.get_ident()
        if len(answers) != 1:
            reason = "batch size" if answers else "data"
            raise fx.proxy.TraceError(
                f"control flow depends on the {reason}"
            ) from failure
        return answers.pop()

    def _value(self, node: fx.Node, batch: int) -> Any:
        """The value of a node, for a batch of this size."""
        values = self.values[batch]
        run = fx.Interpreter(self.root, garbage_collect_values=False, graph=self.graph)
        run.env = values
        with self.fake:
            run.args_iter = iter(
                [self.example.new_empty(batch, *self.example.shape[1:])]
            )
        for earlier in self.graph.nodes:
            if earlier in values:
                continue
            if earlier.op == "placeholder" or self.varying.intersection(
                earlier.all_input_nodes
            ):
                self.varying.add(earlier)
            with (
                self.fake if earlier in self.varying else nullcontext(),
                torch.no_grad(),
            ):
                value = run.run_node(earlier)
                if earlier.op == "get_attr" and not isinstance(value, nn.Parameter):
                    value = value.clone()  # forward may write into a buffer
            values[earlier] = value
        return values[node]


@functools.cache
def _caller(cls: Any) -> Callable[..., Any]:
    """A function that calls cls.apply, with the name of the class."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return cls.apply(*args, **kwargs)

    call.__name__ = call.__qualname__ = cls.__name__
    call.gradient = cls.backward  # type: ignore[attr-defined]
    return call

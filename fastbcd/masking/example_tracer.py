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


class _Proxy(fx.Proxy):
    """A traced value; where Python needs its size, number or truth, the example input gives it."""

    tracer: ExampleTracer

    def __getattr__(self, k: str) -> _Attribute:
        return _Attribute(self, k)


for _name, _kind in (("len", len), ("index", operator.index), ("int", int), ("float", float)):
    setattr(_Proxy, f"__{_name}__", lambda self, k=_kind: self.tracer.known(self.node, k))


class _Attribute(_Proxy, fx.proxy.Attribute):
    pass


@functools.cache
def _caller(cls: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return cls.apply(*args, **kwargs)

    call.__name__ = call.__qualname__ = cls.__name__
    call.gradient = cls.backward  # type: ignore[attr-defined]
    return call


class ExampleTracer(Tracer):
    """Traces forward(x), other arguments at their defaults, for inputs like the example.

    Control flow may depend on the shape and the type of x, except for the batch size, and on the
    weights as they are. Modules of the paths `leaves` are called as a whole.
    """

    proxy_buffer_attributes = True  # 2 * self.buffer follows the buffer

    def __init__(self, example: Tensor, leaves: Collection[str]) -> None:
        super().__init__()
        self.example, self.leaves = example, leaves
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)  # shapes and types without data
        self.values: dict[int, dict[fx.Node, Any]] = {n: {} for n in (len(example), 2, 3, 1009)}
        self.varying: set[fx.Node] = set()  # the nodes that depend on x

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        leaf = module_qualified_name in self.leaves
        return leaf or super().is_leaf_module(m, module_qualified_name)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if attr == "num_batches_tracked":  # see _follow_mode
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_args_for_root(self, root_fn: Any, *_: Any) -> tuple[Any, list[Any]]:
        parameters = list(inspect.signature(root_fn).parameters.values())[1:]
        name = next((p.name for p in parameters if p.kind is not p.VAR_POSITIONAL), "x")
        return root_fn, [self.root, self.create_proxy("placeholder", name, (), {})]

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        """Also marks the tensors that methods of the root, such as forward_features, take."""
        known = {"forward", *dir(nn.Module), *vars(root)}
        methods = {name: getattr(root, name) for name, _ in
                   inspect.getmembers(type(root), inspect.isfunction)
                   if name[0] != "_" and name not in known}  # fmt: skip
        vars(root).update({k: functools.partial(self._mark, k, m) for k, m in methods.items()})
        function: Any = torch.autograd.Function
        original = vars(function)["apply"]
        function.apply = classmethod(functools.partial(self._apply, original.__func__))
        try:
            return super().trace(root, concrete_args)
        finally:
            function.apply = original
            for name in methods:
                del vars(root)[name]

    def _mark(self, name: str, method: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        if args and isinstance(args[0], fx.Proxy) and isinstance(result, fx.Proxy):
            for key, proxy in (("given to", args[0]), ("returned by", result)):
                proxy.node.meta.setdefault(key, set()).add(name)
        return result

    def _apply(self, apply: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
        """cls.apply(*args) of an autograd Function: one call, which keeps its own gradient."""
        traced = any(isinstance(a, fx.Proxy) for a in (*args, *kwargs.values()))
        if not traced or any(map(inspect.isroutine, args)):  # such as checkpoint(function, x)
            return apply(cls, *args, **kwargs)
        return self.create_proxy("call_function", _caller(cls), args, kwargs)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def to_bool(self, obj: fx.Proxy) -> bool:
        return self.known(obj.node, bool)

    def iter(self, obj: Any) -> Any:
        return iter([obj[i] for i in range(self.known(obj.node, len))])

    def known(self, node: fx.Node, kind: Callable[[Any], Any]) -> Any:
        """kind(value of the node), which neither the data nor the batch size may decide."""
        run = fx.Interpreter(self.root, garbage_collect_values=False, graph=self.graph)
        found, failure, self.thread = set(), None, 0  # calls of another thread are not traced
        for batch, values in self.values.items():
            try:
                for n in (n for n in self.graph.nodes if n not in values):
                    if n.op == "placeholder" or self.varying.intersection(n.all_input_nodes):
                        self.varying.add(n)
                    with self.fake if n in self.varying else nullcontext(), torch.no_grad():
                        if n.op == "placeholder":
                            values[n] = self.example.new_empty(batch, *self.example.shape[1:])
                            continue
                        given = fx.node.map_arg((n.args, n.kwargs), values.get)
                        values[n] = getattr(run, n.op)(n.target, *given)
                        if n.op == "get_attr" and not isinstance(values[n], nn.Parameter):
                            values[n] = values[n].clone()  # forward may write into a buffer
                found.add(kind(values[node]))
            except Exception as error:  # such as a size that the net does not run on
                failure = error
        self.thread = threading.get_ident()
        if len(found) != 1:
            reason = "batch size" if found else "data"
            raise fx.proxy.TraceError(f"control flow depends on the {reason}") from failure
        return found.pop()

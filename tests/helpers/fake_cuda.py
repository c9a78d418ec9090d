"""A CUDA device to test with on a machine that has none.

    with fake_cuda.device(memory=2**30) as gpu:
        data, net = data.to("cuda"), net.to("cuda")
        fastbcd.score(net, removals, data)
        assert gpu.counts["sync"] == 1

Its tensors say `cuda:0` or `cuda:1` and lie in CPU memory. Tensors of different devices in one
call raise an error as on CUDA. The C++ kernels of `fastbcd.kernels.cpu` stand in for Triton's: the
library takes the same way to them as on a GPU, and float64 has no kernel. Counted are

    launch    calls that run a kernel, of torch or of fastbcd
    sync      calls that wait for the device: item, tolist, nonzero, equal, indexing by a bool mask
    h2d, d2h  copies from and to the host

`gpu.places` counts the same by source line. `memory` bytes are available per device: a larger
allocation raises torch.OutOfMemoryError, and `torch.cuda.mem_get_info`, `memory_reserved`,
`memory_allocated` and `empty_cache` behave as with torch's caching allocator: freed memory stays
reserved.

A CUDA graph (`torch.cuda.graph`, `make_graphed_callables`) records what runs while it is captured,
and runs it again on the same memory when it is replayed: one launch. During a capture a
synchronisation, a copy from or to the host and an allocation on another device raise; so does a
replay whose input has another shape than the captured one.

Not simulated: streams and events (they do nothing), random numbers of the device (they are the
CPU's), NCCL, and torch.compile. Import this module before torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import types
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).parent


def _load_guard() -> str:
    """Build and load fake_cuda.cpp; returns why that is not possible, or nothing."""
    spec = importlib.util.find_spec("torch")
    root = Path(spec.origin).parent if spec and spec.origin else Path()
    if "torch" in sys.modules:
        return "torch was imported before helpers.fake_cuda"
    if list(root.glob("lib/libtorch_cuda*")):
        return "this torch is built for CUDA"
    if not shutil.which("g++"):
        return "there is no g++"
    source = HERE / "fake_cuda.cpp"
    version = (root / "version.py").read_bytes()
    mark = hashlib.sha256(source.read_bytes() + version).hexdigest()[:16]
    library = HERE.parent.parent / "build" / f"fake_cuda-{mark}.so"
    if not library.exists():
        library.parent.mkdir(exist_ok=True)
        new = library.with_suffix(f".{os.getpid()}")
        flags = ["-shared", "-fPIC", "-std=c++20", f"-I{root / 'include'}", f"-L{root / 'lib'}"]
        flags += ["-ltorch_cpu", "-lc10", f"-Wl,-rpath,{root / 'lib'}"]
        built = subprocess.run(["g++", str(source), "-o", str(new), *flags], capture_output=True)
        if built.returncode:
            return f"fake_cuda.cpp does not compile: {built.stderr.decode()[-2000:]}"
        new.replace(library)
    ctypes.CDLL(str(library))
    return ""


REASON = _load_guard()  # why there is no fake device, or nothing

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map  # noqa: E402

DEVICES = 2
SYNCHRONISING = {
    "_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2",
    "unique_consecutive", "unique_dim", "bincount",
}  # fmt: skip
ALLOCATING = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
MOVING = {"_to_copy", "copy_"}  # calls that may have tensors of two devices
INDEXING = {"index", "index_put_", "index_put", "_index_put_impl_", "_unsafe_index"}


class FakeTensor(Tensor):
    """A tensor of the fake device; `elem` is the CPU tensor that it stands for."""

    elem: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, elem: Tensor, device: torch.device) -> FakeTensor:
        self = Tensor._make_wrapper_subclass(
            cls, elem.size(), strides=elem.stride(), storage_offset=elem.storage_offset(),
            dtype=elem.dtype, device=device,
        )  # fmt: skip
        self.elem = elem
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _current().run(func, args, kwargs or {})

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: FakeTensor) -> None:
        Tensor.data.__set__(self, value)
        self.elem = value.elem

    def data_ptr(self) -> int:
        return self.elem.data_ptr()

    def tolist(self) -> Any:
        _current().count("sync")
        return self.elem.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError(f"can't convert {self.device} device type tensor to numpy")

    def new_tensor(self, data, *, dtype=None, device=None, requires_grad=False) -> Tensor:
        new = _tensor(data, dtype=dtype or self.dtype).to(device or self.device)
        return new.requires_grad_(requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            if not self.is_leaf:
                raise RuntimeError("Only leaf tensors can be copied by deepcopy")
            copied = self.detach().clone().requires_grad_(self.requires_grad)
            if isinstance(self, torch.nn.Parameter):
                copied = torch.nn.Parameter(copied.detach(), self.requires_grad)
            memo[id(self)] = copied
        return memo[id(self)]

    def __repr__(self) -> str:
        return f"FakeTensor({self.elem}, device={str(self.device)!r})"


class Graph:
    """torch.cuda.CUDAGraph."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.calls: list[Any] = []

    def replay(self) -> None:
        _current().count("launch")
        for call in self.calls:
            call()


class Capture(contextlib.AbstractContextManager):
    """torch.cuda.graph."""

    def __init__(self, graph: Graph, *_: Any, **__: Any) -> None:
        self.graph = graph

    def __enter__(self) -> None:
        _current().graph = self.graph
        _current().pool = _current().index

    def __exit__(self, *_: Any) -> None:
        _current().graph = None


class Device(TorchDispatchMode):
    """The fake devices while `device` is active: counters and memory."""

    def __init__(self, memory: int) -> None:
        super().__init__()
        self.memory = memory
        self.counts: Counter[str] = Counter()
        self.places: Counter[tuple[str, str]] = Counter()
        self.index = 0  # torch.cuda.current_device()
        self.allocated = [0] * DEVICES
        self.reserved = [0] * DEVICES
        self.peak = [0] * DEVICES
        self._storages: set[int] = set()
        self.graph: Graph | None = None  # that is captured
        self.pool = 0  # the device that it allocates on

    def reset(self) -> None:
        """Set all counters to 0."""
        self.counts.clear()
        self.places.clear()

    def count(self, kind: str) -> None:
        if self.graph is not None and kind != "launch":
            raise RuntimeError(
                f"CUDA error: operation not permitted when stream is capturing: {kind}"
            )
        self.counts[kind] += 1
        frame = sys._getframe(1)
        while frame is not None:
            _, room, name = frame.f_code.co_filename.rpartition("/fastbcd/")
            if room:
                self.places[kind, f"{name}:{frame.f_lineno}"] += 1
                break
            frame = frame.f_back

    # ------------------------------------------------------------------ memory

    def record(self, call: Any) -> Any:
        """The result of a call, which a graph that is captured repeats into the same memory."""
        out = call()
        if self.graph is not None:
            before = [t for t in tree_leaves(out) if isinstance(t, Tensor)]

            def again() -> None:
                after = [t for t in tree_leaves(call()) if isinstance(t, Tensor)]
                for old, new in zip(before, after, strict=True):
                    if old is not new:
                        old.copy_(new)

            self.graph.calls.append(again)
        return out

    def free_cache(self) -> None:
        self.reserved = list(self.allocated)

    def _allocate(self, elem: Tensor, device: torch.device) -> None:
        """Count the storage of a new tensor until it is freed."""
        storage = elem.untyped_storage()
        key, size, index = storage._cdata, storage.nbytes(), device.index
        if key in self._storages:
            return
        if self.graph is not None and index != self.pool:
            raise RuntimeError("CUDA error: an allocation outside of the pool of a captured graph")
        if self.allocated[index] + size > self.memory:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {size / 2**20:.2f} MiB. GPU {index} has a "
                f"total capacity of {self.memory / 2**20:.2f} MiB of which "
                f"{(self.memory - self.allocated[index]) / 2**20:.2f} MiB is free."
            )
        self._storages.add(key)
        self.allocated[index] += size
        self.reserved[index] = max(self.reserved[index], self.allocated[index])
        self.peak[index] = max(self.peak[index], self.allocated[index])
        weakref.finalize(storage, self._release, key, size, index)

    def _release(self, key: int, size: int, index: int) -> None:
        self._storages.discard(key)
        self.allocated[index] -= size

    # ------------------------------------------------------------------ calls

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of an operator: on the CPU tensors behind its arguments."""
        if _composite(func):  # it consists of other operators, which then come here
            with self:
                return func.decompose(*args, **kwargs)
        leaves = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        fakes = [t for t in leaves if isinstance(t, FakeTensor)]
        wanted = kwargs.get("device")
        wanted = None if wanted is None else self.indexed(wanted)
        space, _, name = func._schema.name.partition("::")
        if name == "_pin_memory":
            return _pinned(args[0].clone())
        if name == "is_pinned":
            return getattr(args[0], "pinned", False)
        if not fakes and (wanted is None or wanted.type != "cuda"):
            if not kwargs.get("pin_memory"):
                return func(*args, **kwargs)
            return _pinned(func(*args, **{**kwargs, "pin_memory": False}))
        if name in MOVING:
            return self._move(func, args, kwargs, wanted)
        self._check_devices(name, args, leaves)
        if space == "fastbcd":  # its implementation, with the tensors of the device
            from fastbcd.ops import registry

            with self:
                return registry.OPERATORS[name].run(*args, **kwargs)
        if name in SYNCHRONISING or (name in INDEXING and _by_mask(args[1])):
            self.count("sync")
        if name in INDEXING and any(
            isinstance(i, Tensor) and i.ndim and not i.is_cuda for i in args[1]
        ):
            self.count("h2d")
        if not func.is_view and name not in ALLOCATING:
            self.count("launch")
        device = wanted or fakes[0].device
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        kwargs = {k: v for k, v in kwargs.items() if k != "pin_memory"}
        plain, named = _plain(args), _plain(kwargs)
        if func.is_view or name in ALLOCATING:
            out = func(*plain, **named)
        else:
            out = self.record(lambda: func(*plain, **named))
        if name in ("_local_scalar_dense", "equal", "is_nonzero") or device.type == "cpu":
            return out
        return self._wrapped(out, fakes, device)

    def _wrapped(self, out: Any, fakes: list[FakeTensor], device: torch.device) -> Any:
        known = {id(t.elem): t for t in fakes}

        def wrap(t: Any) -> Any:
            if not isinstance(t, Tensor):
                return t
            if id(t) in known:
                same = known[id(t)]
                assert same.shape == t.shape, "an operator that changes a shape in place"
                return same
            self._allocate(t, device)
            with torch.inference_mode(t.is_inference()):
                return FakeTensor(t, device)

        return tree_map(wrap, out)

    def _move(self, func: Any, args: Any, kwargs: Any, wanted: torch.device | None) -> Any:
        """_to_copy(self, *, device=...), copy_(self, source)."""
        copying = func._schema.name == "aten::copy_"
        source = args[1] if copying else args[0]
        target = args[0].device if copying else wanted or source.device
        if source.device.type != target.type:
            self.count("h2d" if target.type == "cuda" else "d2h")
            waits = not (kwargs.get("non_blocking") or args[2:] == (True,))
            if target.type == "cpu" and waits:
                self.count("sync")
        elif target.type == "cuda":
            self.count("launch")
        if copying:
            to, values = _plain(args[0]), _plain(source)
            self.record(lambda: to.copy_(values))
            return args[0]
        kwargs = {**kwargs, "device": torch.device("cpu"), "non_blocking": False}
        values = _plain(args)
        out = self.record(lambda: func(*values, **kwargs))
        return self._wrapped(out, [], target) if target.type == "cuda" else out

    @staticmethod
    def _check_devices(name: str, args: tuple[Any, ...], leaves: list[Tensor]) -> None:
        """Refuse tensors of several devices; numbers and indices may be on the CPU."""
        indices = args[1] if name in INDEXING else ()
        found = {
            t.device
            for t in leaves
            if isinstance(t, FakeTensor) or (t.ndim and not any(t is i for i in indices))
        }
        if len(found) > 1:
            first, second = sorted(map(str, found), reverse=True)[:2]
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, "
                f"{first} and {second}! (in {name})"
            )

    def indexed(self, device: Any) -> torch.device:
        """The device with its number."""
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if device.type == "cuda" and device.index is None:
            return torch.device("cuda", self.index)
        if device.type == "cuda" and device.index >= DEVICES:
            raise RuntimeError("CUDA error: invalid device ordinal")
        return device


def _plain(arguments: Any) -> Any:
    return tree_map(lambda t: t.elem if isinstance(t, FakeTensor) else t, arguments)


@functools.cache
def _composite(func: Any) -> bool:
    return func._can_decompose()


def _pinned(t: Tensor) -> Tensor:
    t.pinned = True
    return t


def _by_mask(indices: Any) -> bool:
    return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices)


_active: list[Device] = []


def _current() -> Device:
    if not _active:
        raise RuntimeError("a tensor of the fake CUDA device outlived fake_cuda.device()")
    return _active[-1]


# --------------------------------------------------------------------------- torch.cuda

_tensor = torch.tensor


def _on_device(make: Any) -> Any:
    """torch.tensor and torch.as_tensor: on the CPU, then moved to the device."""

    def made(data: Any, *, device: Any = None, requires_grad: bool = False, **options: Any):
        new = make(data, **options)
        new = new if device is None else new.to(device)
        return new.requires_grad_() if requires_grad else new

    return made


class _Chosen(contextlib.AbstractContextManager):
    """torch.cuda.device(d)."""

    def __init__(self, device: Any) -> None:
        self.device = None if device is None else _current().indexed(device).index

    def __enter__(self) -> None:
        self.before = _current().index
        _current().index = self.before if self.device is None else self.device

    def __exit__(self, *_: Any) -> None:
        _current().index = self.before


class _Nothing:
    """A stream or an event: everything is done already."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = 0

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: True


def _cuda_api(gpu: Device) -> dict[str, Any]:
    """What replaces the names of torch.cuda."""

    def number(device: Any) -> int:
        return gpu.index if device is None else gpu.indexed(device).index

    def choose(device: Any) -> None:
        gpu.index = number(device)

    properties = types.SimpleNamespace(
        name="Fake A100", major=9, minor=0, total_memory=gpu.memory, multi_processor_count=132,
        warp_size=32,
    )  # fmt: skip
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: DEVICES,
        "current_device": lambda: gpu.index,
        "set_device": choose,
        "device": _Chosen,
        "device_of": lambda t: _Chosen(t.device if t.is_cuda else None),
        "get_device_name": lambda device=None: "Fake A100",
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: properties,
        "mem_get_info": lambda d=None: (gpu.memory - gpu.reserved[number(d)], gpu.memory),
        "memory_allocated": lambda d=None: gpu.allocated[number(d)],
        "max_memory_allocated": lambda d=None: gpu.peak[number(d)],
        "memory_reserved": lambda d=None: gpu.reserved[number(d)],
        "empty_cache": gpu.free_cache,
        "synchronize": lambda d=None: gpu.count("sync"),
        "get_rng_state": lambda d="cuda": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, d="cuda": None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "is_current_stream_capturing": lambda: gpu.graph is not None,
        "CUDAGraph": Graph,
        "graph": Capture,
        "Stream": _Nothing,
        "Event": _Nothing,
        "current_stream": _Nothing,
        "default_stream": _Nothing,
        "stream": lambda stream: contextlib.nullcontext(),
    }


def _kernels(gpu: Device, cpu: Any) -> types.ModuleType:
    """The kernels of a module for CPU tensors, for tensors of one device."""
    triton = importlib.import_module("fastbcd.kernels.triton")
    module = types.ModuleType("fake_triton")
    module.DTYPES, module.describe = triton.DTYPES, lambda: "C++ in place of Triton"
    module.TRUSTED = True  # no kernel is compared with the reference on its first launch

    def stand_in(name: str, kernel: Any) -> Any:
        def launch(*args: Any) -> Any:
            tensors = [t for t in args if isinstance(t, Tensor)]
            assert all(isinstance(t, FakeTensor) for t in tensors), "a kernel got a CPU tensor"
            assert len({t.device for t in tensors}) == 1, "a kernel got tensors of two devices"
            assert all(t.stride() == t.elem.stride() for t in tensors)
            gpu.count("launch")
            if "backward" in name and args[2] is not None:
                gpu.count("launch")  # the second stage of sums by channel
            plain = _plain(args)
            return gpu.record(lambda: kernel(*plain))

        return launch

    for name in triton.__all__:
        if callable(getattr(cpu, name, None)):
            setattr(module, name, stand_in(name, getattr(cpu, name)))
    return module


def _no_context(**_: Any) -> Any:
    return contextlib.nullcontext()


@contextlib.contextmanager
def device(memory: int = 2**32, native: bool = False) -> Iterator[Device]:
    """Two fake CUDA devices of so many bytes; everything is as before on exit.

    native: the Triton kernels themselves run, compiled for this CPU (helpers/native_triton.py).
    """
    from fastbcd import kernels
    from fastbcd.scoring.collapsed import build

    if REASON:
        import pytest

        pytest.skip(f"no fake CUDA device: {REASON}")
    gpu = Device(memory)
    with contextlib.ExitStack() as stack:
        cpu = kernels.CPU.module
        if native:
            from helpers import native_triton

            cpu = stack.enter_context(native_triton.on_cpu())
        triton = kernels.Backend("triton", "cuda", _kernels(gpu, cpu), "fake")
        for name, value in _cuda_api(gpu).items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(kernels, "TRITON", triton))
        pool = mock.patch.object(torch.cuda.graphs, "graph_pool_handle", return_value=(0, 0))
        stack.enter_context(pool)
        for name in ("tensor", "as_tensor"):
            made = _on_device(getattr(torch, name))
            stack.enter_context(mock.patch.object(torch, name, made))
        amp = torch.cuda.amp.common
        stack.enter_context(mock.patch.object(amp, "amp_definitely_not_available", bool))
        # It takes no tensors of a class like ours; the values are then computed.
        stack.enter_context(mock.patch.object(build, "FakeTensorMode", _no_context))
        # net.to("cuda") changes the class of a parameter, not only its values.
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, swaps)
        torch.__future__.set_swap_module_params_on_conversion(True)
        _active.append(gpu)
        try:
            with gpu:
                yield gpu
        finally:
            _active.remove(gpu)

"""The library's own Triton kernels, compiled by Triton for a GPU and run natively on this CPU.

    with native_triton.on_cpu() as kernels:     # fastbcd.kernels.triton, for CPU tensors
        kernels.masked_forward(y, x, ...)

Triton compiles a kernel for gfx1100 down to LLVM IR. There the program's and the thread's number
become arguments and address spaces are removed; Triton's own x86 target makes an object of it, with
a loop over programs and threads. This is right as long as threads do not exchange anything: a
kernel with shared memory or a barrier is refused. It says nothing about speed.

Besides the interpreter this is the only way to execute the kernels without a GPU: it runs the code
of the compiler, with its layouts, alignments and rounding, at real sizes.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import shutil
import subprocess
import tempfile
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton._C.libtriton import llvm
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

REASON = "" if shutil.which("gcc") else "there is no gcc to link with"
TARGET = GPUTarget("hip", "gfx1100", 32)
TRIPLE, CPU = "x86_64-unknown-linux-gnu", "x86-64-v3"
FEATURES = "+avx2,+fma,+f16c,+bmi,+bmi2,+sse4.2,+popcnt"
IDS = {"workitem.id.x": "%tid", "workgroup.id.x": "%pid"}
compiled: Counter[str] = Counter()  # kernels by name, each variant once

LOOP = """
define void @loop({own}, i32 %programs, i32 %threads, ptr %hidden) {{
entry:
  br label %program
program:
  %p = phi i32 [0, %entry], [%p1, %next]
  br label %thread
thread:
  %t = phi i32 [0, %program], [%t1, %thread]
  call void @{name}({passed}, i32 %p, i32 %t, ptr %hidden)
  %t1 = add i32 %t, 1
  %more = icmp slt i32 %t1, %threads
  br i1 %more, label %thread, label %next
next:
  %p1 = add i32 %p, 1
  %again = icmp slt i32 %p1, %programs
  br i1 %again, label %program, label %end
end:
  ret void
}}
; rounding to bfloat16, which older compilers' libraries lack
define bfloat @__truncsfbf2(float %x) {{
  %bits = bitcast float %x to i32
  %high = lshr i32 %bits, 16
  %odd = and i32 %high, 1
  %half = add i32 %odd, 32767
  %rounded = add i32 %bits, %half
  %nan = fcmp uno float %x, %x
  %chosen = select i1 %nan, i32 2143289344, i32 %rounded
  %top = lshr i32 %chosen, 16
  %short = trunc i32 %top to i16
  %result = bitcast i16 %short to bfloat
  ret bfloat %result
}}
"""


class Offline:
    """In place of triton's driver: a GPU to compile for."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> str:
        return "native"

    def get_current_stream(self, device: Any) -> int:
        return 0


class Native:
    """One compiled kernel as a function of this CPU."""

    def __init__(self, kernel: Any, name: str) -> None:
        assert kernel.metadata.shared == 0, f"{name} uses shared memory"
        ir, kinds = for_x86(kernel.asm["llir"], name)
        binary = llvm.translate_to_asm(ir, TRIPLE, CPU, FEATURES, [], False, True)
        with tempfile.TemporaryDirectory() as folder:
            source, library = Path(folder, "kernel.o"), Path(folder, "kernel.so")
            source.write_bytes(binary)
            subprocess.run(["gcc", "-shared", "-o", library, source], check=True)
            self.loop = ctypes.CDLL(str(library)).loop
        self.loop.argtypes = [ctypes.c_void_p if k == "ptr" else ctypes.c_int for k in kinds]
        self.loop.argtypes += [ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
        self.threads = kernel.metadata.num_warps * TARGET.warp_size
        constants = ("constexpr", None)
        self.names = [n for n, kind in kernel.src.signature.items() if kind not in constants]
        self.hidden = len(kinds) - len(self.names)  # scratch memory that is not used
        compiled[name] += 1

    def __call__(self, programs: int, values: dict[str, Any]) -> None:
        given = [values[name] for name in self.names]
        passed = [v.data_ptr() if isinstance(v, torch.Tensor) else int(v) for v in given]
        grid = (ctypes.c_int * 64)(programs, 1, 1)
        self.loop(*passed, *[None] * self.hidden, programs, self.threads, ctypes.addressof(grid))


def for_x86(ir: str, name: str) -> tuple[str, list[str]]:
    """The IR of a kernel for this CPU, with `loop`; the types of its arguments."""
    lines = r"target .*|attributes .*|![\w.]+ = .*|source_filename.*|declare .*amdgcn.*"
    ir = re.sub(rf"^(?:{lines})$", "", ir, flags=re.M)
    words = r",? ![a-z.]+ !\d+| #\d+| addrspace\(\d+\)| inreg|amdgpu_kernel |local_unnamed_addr"
    ir = re.sub(words, "", ir)
    for intrinsic, argument in IDS.items():
        name_of = rf"i32 @llvm\.amdgcn\.{intrinsic}\(\)"
        call = rf"(?:tail )?call (?:noundef )?(?:range\([^)]*\) )?{name_of}"
        ir = re.sub(call, f"add i32 {argument}, 0", ir)
    call = r"(?:tail )?call [^@\n]*ptr @llvm\.amdgcn\.implicitarg\.ptr\(\)"
    ir = re.sub(call, "getelementptr i8, ptr %hidden, i64 0", ir)
    ir = re.sub(r"\.p1(?=[.(])", ".p0", ir)
    left = set(re.findall(r"@(llvm\.amdgcn[\w.]*)", ir))
    assert not left, f"{name} uses {left}: threads that exchange values cannot run one by one"
    head = rf"(define void @{name}\()(.*?)(\)\s*\{{)"
    ir = re.sub(head, r"\1\2, i32 %pid, i32 %tid, ptr %hidden\3", ir, flags=re.S)
    (arguments,) = re.findall(rf"define void @{name}\((.*?)\)\s*\{{", ir, flags=re.S)
    kinds = [a.split()[0] for a in re.split(r",\s*(?![^(]*\))", arguments)][:-3]
    own = ", ".join(f"{kind} %a{i}" for i, kind in enumerate(kinds))
    return ir + LOOP.format(name=name, own=own, passed=own), kinds


cache: dict[Any, Native] = {}


def launcher(self: JITFunction, grid: tuple[int, ...]) -> Any:
    """In place of kernel[grid]: compile it as for a GPU, and run it here."""

    def launch(*args: Any, **options: Any) -> None:
        options.pop("maxnreg", None)  # of CUDA alone
        with mock.patch.object(triton.runtime.driver, "_active", Offline()):
            kernel = self.run(*args, grid=grid, warmup=True, **options)
        if kernel.hash not in cache:
            cache[kernel.hash] = Native(kernel, self.fn.__name__)
        cache[kernel.hash](grid[0], dict(zip(self.arg_names, args, strict=False)) | options)

    return launch


@contextlib.contextmanager
def changed(function: JITFunction, old: str, new: str) -> Iterator[None]:
    """A fault in a kernel, or in a function that the kernels of its file call."""
    from fastbcd.kernels.triton import masked

    before = function.src
    assert before.count(old) == 1, f"{old!r} is {before.count(old)} times in {function.__name__}"
    for source in (before.replace(old, new), before):
        function._unsafe_update_src(source)
        for kernel in (masked.masked_forward_kernel, masked.masked_backward_kernel):
            kernel.hash = None
            kernel.device_caches.clear()
        for helper in vars(masked).values():
            if isinstance(helper, JITFunction):
                helper.hash = None
        if source is not before:
            yield


@contextlib.contextmanager
def on_cpu() -> Iterator[types.ModuleType]:
    """fastbcd.kernels.triton, whose kernels take CPU tensors."""
    if REASON:
        import pytest

        pytest.skip(f"no native kernels: {REASON}")
    from fastbcd.kernels import triton as kernels

    with (
        mock.patch.dict("os.environ", {"AMDGCN_USE_BUFFER_OPS": "0"}),
        mock.patch.object(JITFunction, "__getitem__", launcher),
        mock.patch.object(kernels, "TRUSTED", True),
    ):
        llvm.init_targets()
        yield kernels

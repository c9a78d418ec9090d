"""The Triton kernels compiled for GPUs that need not be there, and what the machine code shows.

A case is run through the library's own launcher, with a driver that only compiles in place of
triton's: what is looked at here is what a GPU would be given, down to the block size and to
what triton knows about the alignment of each argument.

Asserted of the code: no spills to local memory, no shared memory, every tensor accessed 128
bits at a time where an item is a multiple of 16 elements, no fused multiply-add.
"""

from __future__ import annotations

import functools
import re
import struct
import subprocess
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest import mock

import pytest

from helpers.triton_cases import KERNELS, SOFT_KERNELS, Case, run, tensors

pytest.importorskip("triton.language", reason="triton is not installed")
kernels = pytest.importorskip("fastbcd.kernels.triton")

import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from fastbcd.kernels import INTERPRETED  # noqa: E402

pytestmark = pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET=1: nothing is compiled")

FULL = {f"sm_{arch}": GPUTarget("cuda", arch, 32) for arch in (80, 90)}
PART = {f"sm_{arch}": GPUTarget("cuda", arch, 32) for arch in (86, 100, 120)}
HIP = GPUTarget("hip", "gfx942", 64)

ALIGNED = (2, 2, 64, 8, 4)  # T, B, C, H, W
SEVEN = (2, 2, 64, 7, 7)  # an item is a multiple of 16 elements, a channel is not
MANY = (33, 2, 64, 8, 4)  # more trials than bits in a word
SMALL = (2, 2, 16, 2, 4)  # one warp
UNALIGNED = (2, 2, 7, 12, 13)
FEATURES = (2, 2, 100)  # unaligned, no spatial sizes


def variants(op: str, direction: str) -> list[Case]:
    """What differs in the code: dtype, operands, memory orders, sharing, alignment."""
    first = Case(op, direction, sizes=ALIGNED)
    last = first._replace(last=True, mask_last=True)
    both = first._replace(trials="both shared", mask_last=True)
    common = [first, last._replace(mask_last=False), last._replace(trials="shared x"), both]
    common += [first._replace(frozen=True)] if direction == "backward" else []
    only_float32 = [
        first._replace(affine=False, residual=False),
        last._replace(residual=False),
        last,
        first._replace(mask_last=True),
        last._replace(trials="shared residual"),
        first._replace(sizes=SEVEN),
        first._replace(sizes=UNALIGNED, mask_last=True),
        first._replace(sizes=FEATURES),
        both._replace(sizes=MANY),
    ]
    half = [c._replace(dtype="float16") for c in (*common, last._replace(sizes=SMALL))]
    return [*common, *only_float32, *half, last._replace(dtype="bfloat16")]


def part(op: str, direction: str) -> list[Case]:
    case = Case(op, direction, sizes=ALIGNED, last=True)
    return [
        case,
        case._replace(dtype="float16", trials="both shared"),
        case._replace(dtype="bfloat16", last=False, frozen=direction == "backward"),
    ]


def soft_variants(op: str, direction: str) -> list[Case]:
    """The kernels without trials and affine."""
    first = Case(op, direction, affine=False, sizes=ALIGNED)
    last = first._replace(last=True, mask_last=True)
    common = [first, last]
    common += [last._replace(mask_last=False)] if op != "soft" else []
    only_float32 = [
        first._replace(residual=False),
        first._replace(sizes=SEVEN),
        first._replace(sizes=UNALIGNED, mask_last=True),
        first._replace(sizes=FEATURES),
    ]
    half = [c._replace(dtype="float16") for c in (*common, last._replace(sizes=SMALL))]
    return [*common, *only_float32, *half, last._replace(dtype="bfloat16")]


def soft_part(op: str, direction: str) -> list[Case]:
    case = Case(op, direction, affine=False, sizes=ALIGNED, last=True)
    return [case, case._replace(dtype="float16"), case._replace(dtype="bfloat16", last=False)]


PARTS = [c for k in KERNELS for c in part(*k)] + [c for k in SOFT_KERNELS for c in soft_part(*k)]
CASES = {
    **{
        name: [c for k in KERNELS for c in variants(*k)]
        + [c for k in SOFT_KERNELS for c in soft_variants(*k)]
        for name in FULL
    },
    **dict.fromkeys((*PART, "gfx942"), PARTS),
}
TARGETS = {**FULL, **PART, "gfx942": HIP}


class Offline:
    """In place of triton's driver: a GPU to compile for."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> str:
        return f"{self.target.backend}:{self.target.arch}"

    def get_current_stream(self, device: Any) -> int:
        return 0


def compile_case(case: Case, target: GPUTarget) -> Any:
    """The kernel that the library would launch for this case on this GPU."""
    compiled = []

    def compile_only(self: JITFunction, grid: tuple[int, ...]) -> Any:
        def call(*args: Any, **options: Any) -> None:
            compiled.append((self.run(*args, grid=grid, warmup=True, **options), options["BLOCK"]))

        return call

    with (
        mock.patch.object(triton.runtime.driver, "_active", Offline(target)),
        mock.patch.object(JITFunction, "__getitem__", compile_only),
        mock.patch.object(kernels.common, "WARP_SIZE", target.warp_size),
    ):
        run(case, tensors(case), kernels)
    (only,) = compiled
    return only


class Code(NamedTuple):
    """A compiled kernel: its resources, its instructions, the IR it came from."""

    resources: dict[str, int]  # REG, STACK, SHARED, LOCAL
    instructions: list[str]  # such as LDG.E.128
    ttir: str
    per_thread: int  # elements

    def widths(self, instruction: str) -> Counter[int]:
        """How many accesses there are of each width in bits."""
        found: Counter[int] = Counter()
        for name in self.instructions:
            first, *modifiers = name.split(".")
            if first == instruction:
                sizes = [int(m.lstrip("US")) for m in modifiers if re.fullmatch(r"[US]?\d+", m)]
                found[sizes[0] if sizes else 32] += 1
        return found


@functools.cache
def code(name: str) -> dict[Case, Code | Exception]:
    """All cases of one CUDA target. Compiled one by one, disassembled together: that is faster."""
    target = TARGETS[name]
    built: dict[Case, Any] = {}
    for case in dict.fromkeys(CASES[name]):
        try:
            built[case] = compile_case(case, target)
        except Exception as error:  # told by the case's own tests
            built[case] = error
    good = {case: k for case, k in built.items() if not isinstance(k, Exception)}
    listings = disassemble([k.asm["cubin"] for k, _ in good.values()], target.arch)
    for (case, (kernel, block)), listing in zip(good.items(), listings, strict=True):
        threads = kernel.metadata.num_warps * target.warp_size
        resources = resource_usage(kernel.asm["cubin"])
        resources["SHARED"] += kernel.metadata.shared  # allocated at launch
        built[case] = Code(resources, listing, kernel.asm["ttir"], block // threads)
    return built


def resource_usage(cubin: bytes) -> dict[str, int]:
    with TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        tool = triton.knobs.nvidia.cuobjdump.path
        text = subprocess.check_output([tool, "--dump-resource-usage", str(path)], text=True)
    return {k: int(v) for k, v in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", text)}


def disassemble(cubins: list[bytes], arch: int) -> list[list[str]]:
    """The instructions of each cubin, without operands."""
    texts = [machine_code(cubin) for cubin in cubins]
    with TemporaryDirectory() as folder:
        path = Path(folder, "kernels.bin")
        path.write_bytes(b"".join(texts))
        tool = triton.knobs.nvidia.nvdisasm.path
        listing = subprocess.check_output([tool, "--binary", f"SM{arch}", str(path)], text=True)
    lines = re.findall(r"/\*([0-9a-f]+)\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)", listing)
    found: list[list[str]] = [[] for _ in texts]
    ends = [sum(map(len, texts[: i + 1])) for i in range(len(texts))]
    current = 0
    for address, instruction in lines:
        while int(address, 16) >= ends[current]:
            current += 1
        found[current].append(instruction)
    return found


def machine_code(cubin: bytes) -> bytes:
    """The .text section of a cubin, which is an ELF file with one kernel."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    (text,) = (
        cubin[offset : offset + length]
        for name, _, _, _, offset, length in sections
        if cubin.startswith(b".text.", sections[names][4] + name)
    )
    return text


def cuda_cases(*excluded: tuple[int, ...]) -> Any:
    pairs = [(n, c) for n in (*FULL, *PART) for c in CASES[n] if c.sizes not in excluded]
    return pytest.mark.parametrize(("name", "case"), pairs, ids=[f"{n}-{c}" for n, c in pairs])


def code_of(name: str, case: Case) -> Code:
    found = code(name)[case]
    if isinstance(found, Exception):
        raise found
    return found


def reduces(case: Case) -> bool:
    """The call writes partial sums."""
    affine = case.affine and not case.frozen
    return case.direction == "backward" and (case.op != "relu" or affine)


@cuda_cases()
def test_nothing_leaves_the_registers(name: str, case: Case):
    resources = code_of(name, case).resources
    assert resources == {**resources, "STACK": 0, "SHARED": 0, "LOCAL": 0}
    assert resources["REG"] <= kernels.common.MAX_REGISTERS
    memory = {"LDL", "STL", "LDS", "STS", "BAR"}
    assert not memory & {i.split(".")[0] for i in code_of(name, case).instructions}


@cuda_cases(UNALIGNED, FEATURES)
def test_accesses_are_wide(name: str, case: Case):
    found = code_of(name, case)
    half = case.dtype != "float32"
    wide = 64 if half and reduces(case) else 128  # partial sums are fp32: 4 elements a thread
    assert found.per_thread * (16 if half else 32) == wide

    backward, relu = case.direction == "backward", case.op == "relu"
    tiles = 1 + (case.residual and not (relu and backward)) + backward  # x or y, residual, grad
    tiles += backward and relu and reduces(case)  # x
    parameters = case.affine * (1 if relu and backward else 2)
    parameters += {"poly": 2 if backward else 3, "indicator": 3, "saliency_poly": 3}.get(case.op, 0)
    in_order = case.last == case.mask_last
    mask = 8 * found.per_thread if in_order else 8
    masks = 1 if in_order else found.per_thread
    if case.op == "soft":  # numbers of 32 bits instead of bytes, always in x's order
        mask, masks = 128, found.per_thread * 32 // 128
    parameter = 128 if case.last else 32

    loads = found.widths("LDG")
    assert loads.keys() <= {wide, mask, *([parameter] if parameters else [])}
    least = Counter({wide: tiles})
    least[parameter] += parameters * found.per_thread * 32 // parameter
    least[mask] += masks
    assert loads >= least, f"{loads}, at least {least}"

    stores = found.widths("STG")
    sums = {"relu": 0, "poly": 3, "indicator": 4}.get(case.op, 1) + 2 * case.affine
    sums *= reduces(case)
    both = case.residual and not case.frozen and (case.op, "backward") in KERNELS  # dresidual
    outputs = 1 + (backward and both)
    assert stores.keys() <= {wide, *([128] if sums else [])}
    least = Counter({wide: outputs})
    least[128] += sums
    assert stores >= least, f"{stores}, at least {least}"


@cuda_cases()
def test_every_operation_rounds(name: str, case: Case):
    arithmetic = [i for i in code_of(name, case).instructions if re.match(r"F(FMA|MUL|ADD)", i)]
    assert not [i for i in arithmetic if i.startswith("FFMA") or "FTZ" in i]
    assert arithmetic or (case.op == "relu" and not case.affine)


@cuda_cases()
def test_offsets_of_items_are_64_bit(name: str, case: Case):
    pattern = r"tt\.addptr %(\w+)_ptr, \S+ : !tt\.ptr<\w+>, (i\d+)"
    found = re.findall(pattern, code_of(name, case).ttir)
    assert ("alpha" if case.op == "soft" else "mask") in dict(found)
    assert {width for pointer, width in found if pointer != "coef"} == {"i64"}


@pytest.mark.parametrize("case", CASES["gfx942"], ids=str)
def test_on_amd(case: Case):
    text = compile_case(case, HIP)[0].asm["amdgcn"]
    names = ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size")
    for resource in (*names, "group_segment_fixed_size"):
        assert set(re.findall(rf"\.{resource}: +(\d+)", text)) == {"0"}, resource
    stores = set(re.findall(r"(?:global|buffer)_store_(\w+)", text))
    half = case.dtype != "float32" and reduces(case)
    assert stores == ({"dwordx4", "dwordx2"} if half else {"dwordx4"})
    assert "load_dwordx4" in text
    assert not re.findall(r"v_(?:pk_)?fmac?_f32\w*", text)

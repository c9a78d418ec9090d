"""The Triton kernels compiled for GPUs that need not be present, and their machine code.

A case runs through the op and the library's own launcher, with a driver that only compiles in
place of triton's: the code is what a GPU would be given, down to the block size and to what triton
knows about the alignment of each argument.

Asserted: no spills to local memory, no shared memory, every tensor accessed 128 bits at a time
where an item is a multiple of 16 elements, no fused multiply-add.
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
import torch

from fastbcd import kernels
from fastbcd.ops.kink import kink
from helpers.op_cases import MASKED, SALIENCY, UNSTACKED, Case, arguments, results, rows

pytest.importorskip("triton.language", reason="triton is not installed")
triton_kernels = pytest.importorskip("fastbcd.kernels.triton")

import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

pytestmark = pytest.mark.skipif(
    kernels.INTERPRETED, reason="TRITON_INTERPRET=1: nothing is compiled"
)

CUDA = {f"sm_{arch}": GPUTarget("cuda", arch, 32) for arch in (80, 86, 90, 100, 120)}
AMD = {"gfx942": GPUTarget("hip", "gfx942", 64), "gfx1100": GPUTarget("hip", "gfx1100", 32)}
TARGETS = {**CUDA, **AMD}

ALIGNED = (2, 2, 64, 8, 4)  # T, B, C, H, W
SEVEN = (2, 2, 64, 7, 7)  # an item is a multiple of 16 elements, a channel is not
MANY = (33, 2, 64, 8, 4)  # more trials than bits in a word
SMALL = (2, 2, 16, 2, 4)  # one warp
UNALIGNED = (2, 2, 7, 12, 13)
FEATURES = (2, 2, 100)  # unaligned, no spatial sizes


def few(op: str) -> list[Case]:
    """The cases of every target: each dtype, each memory order, shared and not."""
    first = Case(op, affine=op in MASKED, residual=True, sizes=ALIGNED)
    last = first._replace(order="channels_last")
    if op not in MASKED:
        return [last, last._replace(dtype="float16"), first._replace(dtype="bfloat16")]
    return [
        last,
        last._replace(dtype="float16", trials="both shared"),
        first._replace(dtype="bfloat16", frozen=True),
    ]


def many(op: str) -> list[Case]:
    """Everything that differs in the code: dtype, operands, memory orders, sharing, alignment."""
    affine = op in MASKED
    first = Case(op, affine=affine, residual=True, sizes=ALIGNED)
    last = first._replace(order="channels_last", mask_order="channels_last")
    common = [first, last, last._replace(mask_order="contiguous")]
    if affine:
        both = first._replace(trials="both shared", mask_order="channels_last")
        common += [last._replace(trials="shared x"), both, first._replace(frozen=True)]
    only_float32 = [
        first._replace(affine=False, residual=False),
        last._replace(residual=False),
        first._replace(sizes=SEVEN),
        first._replace(sizes=UNALIGNED, mask_order="channels_last"),
        first._replace(sizes=FEATURES),
    ]
    if affine:
        only_float32 += [
            first._replace(mask_order="channels_last"),
            last._replace(trials="shared residual"),
            both._replace(sizes=MANY),
        ]
    half = [c._replace(dtype="float16") for c in (*common, last._replace(sizes=SMALL))]
    return [*common, *only_float32, *half, last._replace(dtype="bfloat16")]


OPS = (*MASKED, *UNSTACKED)
CASES = {
    name: list(dict.fromkeys(
        case for op in OPS for case in few(op) + (many(op) if name in ("sm_80", "sm_90") else [])
    ))
    for name in TARGETS
}  # fmt: skip
# make test compiles these; the rest is long.
QUICK = [("sm_90", case) for op in OPS for case in few(op)]


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


def compiled(target: GPUTarget, call: Any) -> dict[str, tuple[Any, int]]:
    """{"forward" or "backward": (the kernel, its block)} that call() would launch on this GPU."""
    found = {}

    def compile_only(self: JITFunction, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            direction = "forward" if "forward" in self.fn.__name__ else "backward"
            kernel = self.run(*args, grid=grid, warmup=True, **options)
            found[direction] = kernel, options.get("BLOCK", 0)

        return launch

    with (
        mock.patch.object(triton.runtime.driver, "_active", Offline(target)),
        mock.patch.object(JITFunction, "__getitem__", compile_only),
        mock.patch.object(triton_kernels.common, "warp_size", return_value=target.warp_size),
        mock.patch.object(triton_kernels.common, "ON_CUDA", target.backend == "cuda"),
        mock.patch.object(kernels, "module_for", return_value=triton_kernels),
        mock.patch.object(triton_kernels, "TRUSTED", True),
    ):
        call()
    return found


@functools.cache
def compile_case(name: str, case: Case) -> dict[str, tuple[Any, int]]:
    return compiled(TARGETS[name], lambda: results(case, arguments(case)))


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
def code_of(name: str, case: Case) -> dict[str, Code]:
    """The code of a case on a CUDA target, by direction."""
    target = TARGETS[name]
    built = compile_case(name, case)
    assert set(built) == {"forward", "backward"}
    listings = disassemble([k.asm["cubin"] for k, _ in built.values()], target.arch)
    found = {}
    for (direction, (kernel, block)), listing in zip(built.items(), listings, strict=True):
        threads = kernel.metadata.num_warps * target.warp_size
        resources = resource_usage(kernel.asm["cubin"])
        resources["SHARED"] += kernel.metadata.shared  # allocated at launch
        found[direction] = Code(resources, listing, kernel.asm["ttir"], block // threads)
    return found


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
    pairs = [(n, c) for n in CUDA for c in CASES[n] if c.sizes not in excluded]
    return pytest.mark.parametrize(
        ("name", "case"),
        [
            pytest.param(n, c, id=f"{n}-{c}", marks=[] if (n, c) in QUICK else pytest.mark.long)
            for n, c in pairs
        ],
    )


def reduces(case: Case, direction: str) -> bool:
    """The call writes partial sums."""
    small = not case.frozen and (case.affine or rows(case.op))
    return direction == "backward" and bool(case.op in UNSTACKED or small)


@cuda_cases()
def test_nothing_leaves_the_registers(name: str, case: Case) -> None:
    for code in code_of(name, case).values():
        assert code.resources == {**code.resources, "STACK": 0, "SHARED": 0, "LOCAL": 0}
        assert code.resources["REG"] <= triton_kernels.common.MAX_REGISTERS
        memory = {"LDL", "STL", "LDS", "STS", "BAR"}
        assert not memory & {i.split(".")[0] for i in code.instructions}


@cuda_cases()
def test_enough_work_is_under_way(name: str, case: Case) -> None:
    """Warps of a processor, the bytes they wait for, and the length of the code per element.

    A100 and H100 need 10 and 15 KB per processor to use all of their bandwidth.
    """
    for direction, code in code_of(name, case).items():
        registers = 8 * -(-code.resources["REG"] // 8)
        warps = min(64, 65536 // (32 * registers))
        if reduces(case, direction):
            warps = min(warps, 32)  # a program has one warp, and a processor takes 32 programs
        assert warps >= 16
        itemsize = 4 if case.dtype == "float32" else 2
        assert warps * 32 * code.per_thread * itemsize * tensors_read(case, direction) >= 8192
        assert len(code.instructions) <= 250 * max(4, code.per_thread)


def tensors_read(case: Case, direction: str) -> int:
    """How many tiles of items: x or y, residual, grad."""
    backward, relu = direction == "backward", case.op == "masked_relu"
    tiles = 1 + (case.residual and not (relu and backward)) + backward
    return tiles + (relu and reduces(case, direction))


@cuda_cases(UNALIGNED, FEATURES)
def test_accesses_are_wide(name: str, case: Case) -> None:
    for direction, code in code_of(name, case).items():
        check_widths(case, direction, code)


def check_widths(case: Case, direction: str, code: Code) -> None:
    half, sums_too = case.dtype != "float32", reduces(case, direction)
    wide = 64 if half and sums_too else 128  # partial sums are fp32: 4 elements per thread
    assert code.per_thread * (16 if half else 32) == wide

    backward, relu = direction == "backward", case.op == "masked_relu"
    tiles = tensors_read(case, direction)
    parameters = case.affine * (1 if relu and backward else 2)
    # The gradient of z needs no c0; the effects of units do.
    parameters += max(0, rows(case.op) - (backward and case.op in MASKED))
    in_order = case.order == case.mask_order
    mask = 8 * code.per_thread if in_order else 8
    masks = 1 if in_order else code.per_thread
    if case.op == "soft_relu":  # numbers of 32 bits instead of bytes, always in x's order
        mask, masks = 128, code.per_thread * 32 // 128
    parameter = 128 if case.order == "channels_last" else 32

    loads = code.widths("LDG")
    assert loads.keys() <= {wide, mask, *([parameter] if parameters else [])}
    least = Counter({wide: tiles})
    least[parameter] += parameters * code.per_thread * 32 // parameter
    least[mask] += masks
    assert loads >= least, f"{direction}: {loads}, at least {least}"

    stores = code.widths("STG")
    sums = (0 if case.op in SALIENCY else rows(case.op)) + 2 * case.affine
    sums = (sums + (case.op in UNSTACKED)) * sums_too
    # dx is also the gradient of the residual where there is no scale.
    separate = case.affine or "shared " in case.trials
    both = backward and case.residual and not case.frozen and case.op in MASKED and separate
    assert stores.keys() <= {wide, *([128] if sums else [])}
    least = Counter({wide: 1 + both})
    least[128] += sums
    assert stores >= least, f"{direction}: {stores}, at least {least}"


@cuda_cases()
def test_every_operation_rounds(name: str, case: Case) -> None:
    for code in code_of(name, case).values():
        arithmetic = [i for i in code.instructions if re.match(r"F(FMA|MUL|ADD)", i)]
        assert not [i for i in arithmetic if i.startswith("FFMA") or "FTZ" in i]
        assert arithmetic or (case.op == "masked_relu" and not case.affine)


@cuda_cases()
def test_offsets_of_items_are_64_bit(name: str, case: Case) -> None:
    for code in code_of(name, case).values():
        pattern = r"tt\.addptr %(\w+)_ptr, \S+ : !tt\.ptr<\w+>, (i\d+)"
        found = re.findall(pattern, code.ttir)
        assert "mask" in dict(found)
        assert {width for pointer, width in found if pointer != "coef"} == {"i64"}


@pytest.mark.parametrize("name", AMD)
@pytest.mark.parametrize(
    "case", [CASES["gfx942"][0], *(pytest.param(c, marks=pytest.mark.long)
                                   for c in CASES["gfx942"][1:])], ids=str,
)  # fmt: skip
def test_on_amd(name: str, case: Case) -> None:
    for direction, (kernel, block) in compile_case(name, case).items():
        text = kernel.asm["amdgcn"]
        names = ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size")
        for resource in (*names, "group_segment_fixed_size"):
            assert set(re.findall(rf"\.{resource}: +(\d+)", text)) == {"0"}, resource
        text = re.sub(r"_b(\d+)\b", lambda bits: "_dwordx" + str(int(bits[1]) // 32), text)
        stores = set(re.findall(r"(?:global|buffer)_store_(\w+)", text))
        half = case.dtype != "float32" and reduces(case, direction)
        assert stores == ({"dwordx4", "dwordx2"} if half else {"dwordx4"})
        assert "load_dwordx4" in text
        assert not re.findall(r"v_(?:pk_)?fmac?_f32\w*", text)
        # 16 waves of a compute unit, that is 4 of each SIMD, have 128 registers per thread each.
        (registers,) = re.findall(r"\.vgpr_count: +(\d+)", text)
        assert int(registers) <= 128
        per_thread = block // (kernel.metadata.num_warps * TARGETS[name].warp_size)
        itemsize = 4 if case.dtype == "float32" else 2
        under_way = 16 * TARGETS[name].warp_size * per_thread * itemsize
        assert under_way * tensors_read(case, direction) >= 8192
        instructions = re.findall(r"^\s+(?:[vs]|global|buffer|flat|ds)_\w+", text, re.MULTILINE)
        assert len(instructions) <= 200 * per_thread


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize(
    ("name", "batch"),
    [
        pytest.param(n, b, marks=[] if n == "sm_90" and b in (3, 128) else pytest.mark.long)
        for n in TARGETS
        for b in (3, 32, 100, 128, 1024)
    ],
)
def test_kink(name: str, batch: int, fresh: bool) -> None:
    """No spills, no shared memory, no division per element; wide accesses of aligned rows."""
    c, a, mask = torch.zeros(33, 8, batch), torch.zeros(33, batch), torch.zeros(33, 8).byte()
    ((kernel, _),) = compiled(TARGETS[name], lambda: kink(c, a, mask, fresh=fresh)).values()
    assert kernel.metadata.shared == 0
    if name not in CUDA:
        return
    cubin = kernel.asm["cubin"]
    resources = resource_usage(cubin)
    assert resources["STACK"] == resources["LOCAL"] == 0
    assert resources["REG"] <= 40
    (instructions,) = disassemble([cubin], TARGETS[name].arch)
    # The two divisions find a program's kink and tile. A thread has 4 elements.
    assert sum(i.startswith("MUFU.RCP") for i in instructions) <= 2
    if batch % 16 == 0:
        code = Code(resources, instructions, "", 4)
        assert code.widths("LDG") == Counter({128: 1 if fresh else 2, 8: 1})
        assert code.widths("STG") == Counter({128: 1})

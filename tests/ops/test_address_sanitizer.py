"""The C++ kernels built with -fsanitize=address: no op reads or writes beyond its memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = ["tests/ops/test_ops.py", "tests/ops/test_memory.py", "tests/ops/test_masked.py",
         "tests/ops/test_norm.py", "tests/hostile/test_ops_fuzz.py"]  # fmt: skip
WRITE_BEYOND = """
import torch
from fastbcd import kernels
ops, x = torch.ops.fastbcd_cpu, torch.zeros(4096)
x.untyped_storage().resize_(64)  # x still has 4096 elements
mask = torch.ones(4096, dtype=torch.uint8)
ops.masked_forward.default(x, x, mask, None, None, None, None, [1, 1, 4096, 1, 0, 0, 0, 0])
"""


def preloaded() -> str | None:
    """The sanitizer's library, and that of C++: it must know how exceptions are thrown."""
    compiler, paths = shutil.which("g++"), []
    for name in ("libasan.so", "libstdc++.so") if compiler else ():
        command = [str(compiler), f"-print-file-name={name}"]
        paths.append(subprocess.check_output(command, text=True).strip())
    return " ".join(paths) if paths and all(Path(p).is_file() for p in paths) else None


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory) -> dict[str, str]:
    """The environment of a process that uses kernels built with the sanitizer."""
    libraries = preloaded()
    if libraries is None:
        pytest.skip("g++ has no libasan")
    source = tmp_path_factory.mktemp("sanitized")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    ignored = shutil.ignore_patterns("*.so", "build.json", "__pycache__")
    for name in ("fastbcd", "kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    flags = "-fsanitize=address -fno-omit-frame-pointer"
    environment = {**os.environ, "CFLAGS": flags, "CXXFLAGS": flags, "LDFLAGS": flags}
    done = subprocess.run(
        [sys.executable, "setup.py", "build_py", "--build-lib", "out",
         "build_ext", "--build-lib", "out", "--build-temp", "tmp"],
        cwd=source, capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (built,) = (source / "out" / "fastbcd" / "kernels" / "cpu").glob("_kernels*.so")
    assert b"__asan_report" in built.read_bytes()
    return {
        **os.environ,
        "LD_PRELOAD": libraries,
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": os.pathsep.join([str(source / "out"), str(ROOT / "tests")]),
        "PYTHONMALLOC": "malloc",
    }


def run(environment: dict[str, str], *arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=cwd, capture_output=True, text=True,
        timeout=7200,
    )  # fmt: skip


@pytest.mark.long
def test_the_sanitizer_is_active(sanitized, tmp_path) -> None:
    """A call that would read beyond its memory is found, so the next test can fail."""
    done = run(sanitized, "-c", WRITE_BEYOND, cwd=tmp_path)
    assert done.returncode != 0
    assert "AddressSanitizer" in done.stderr


@pytest.mark.long
def test_no_op_leaves_its_memory(sanitized, tmp_path) -> None:
    where = run(sanitized, "-c", "import fastbcd.kernels.cpu as c; print(c.__file__)", cwd=tmp_path)
    assert where.stdout.startswith(sanitized["PYTHONPATH"].split(os.pathsep)[0])
    paths = [str(ROOT / path) for path in TESTS]
    quick = ("-m", "not long", "-x", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"))
    options = f"{sanitized['ASAN_OPTIONS']}:log_path={tmp_path / 'report'}"
    environment = {**sanitized, "ASAN_OPTIONS": options, "FASTBCD_HOSTILE_SECONDS": "0"}
    done = run(environment, "-m", "pytest", *quick, *paths, cwd=tmp_path)
    reports = "\n".join(path.read_text()[:5000] for path in tmp_path.glob("report*"))
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:] + reports

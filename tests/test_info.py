"""`fastbcd info`, the command line, and what happens where a backend is missing."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fastbcd
from fastbcd import info, kernels
from fastbcd.cli import main as cli
from fastbcd.ops.selfcheck import comparisons

ROOT = Path(__file__).parents[1]


def test_backends_say_what_runs_and_why_not() -> None:
    cpu, triton = fastbcd.backends()
    assert cpu.name == "cpu"
    assert "C++" in cpu.reason
    assert "in use" in str(cpu)
    if not torch.cuda.is_available() and not kernels.INTERPRETED:
        assert triton.module is None
        assert torch.__version__ in triton.reason


def test_info_prints_versions_and_reasons(capsys) -> None:
    assert cli.main(["info"]) == 0
    out = capsys.readouterr().out
    assert f"torch        {torch.__version__}" in out
    for backend in fastbcd.backends():
        assert backend.reason in out


def test_check_prints_what_a_first_use_compiles(capsys, monkeypatch) -> None:
    """At most a third of the 173 kernels that it once took."""
    monkeypatch.setattr(info, "comparisons", lambda device: [])
    assert info.info(check=True) == 0
    (count,) = re.findall(r"step compiles (\d+) kernels", capsys.readouterr().out)
    assert 0 < int(count) <= 173 / 3


def test_check_passes(capsys) -> None:
    assert info.info(check=True) == 0
    assert "all kernels agree" in capsys.readouterr().out


KERNELS = [n for n in vars(kernels.CPU.module) if n.endswith(("_forward", "_backward", "kink"))]


def broken(name: str, monkeypatch) -> None:
    """Make a kernel write a wrong value."""
    module = kernels.module_for(torch.empty(0))
    right = getattr(module, name)

    def wrong(out, *rest):
        right(out, *rest)
        out[..., -1] += 1

    monkeypatch.setattr(module, name, wrong)


@pytest.mark.parametrize("name", KERNELS)
def test_check_looks_at_every_kernel(name, monkeypatch) -> None:
    broken(name, monkeypatch)
    found = {check.kernel: 0 for check, bad in comparisons("cpu") if bad}
    assert list(found) == [name]


def test_check_reports_a_failure(capsys, monkeypatch) -> None:
    broken("masked_forward", monkeypatch)
    assert info.info(check=True) == 1
    assert "FAILED cpu masked_forward" in capsys.readouterr().out


def test_check_goes_on_after_a_kernel_that_fails(capsys, monkeypatch) -> None:
    def fails(*arguments: object) -> None:
        raise RuntimeError("PTX was compiled with an unsupported toolchain")

    monkeypatch.setattr(kernels.module_for(torch.empty(0)), "masked_backward", fails)
    assert info.info(check=True) == 1
    out = capsys.readouterr().out
    assert "FAILED cpu masked_backward-identity-float16" in out
    assert "RuntimeError: PTX was compiled with an unsupported toolchain" in out
    assert "kink                     agrees" in out
    assert "Please report all of this output." in out
    assert f"torch        {torch.__version__}" in out


IMPORT_WITH_A_GPU = """
import torch

def initialise(*arguments):
    raise SystemExit("CUDA was initialised")

torch.cuda.is_available = lambda: True
torch.cuda._lazy_init = torch.cuda.get_device_properties = torch.cuda.current_device = initialise
import fastbcd
assert fastbcd.kernels.TRITON.module is not None, fastbcd.kernels.TRITON.reason
"""


def test_import_does_not_initialise_cuda() -> None:
    """A process that forks after the import, such as a DataLoader's, may then use CUDA."""
    pytest.importorskip("triton.language", reason="triton is not installed")
    done = run_python(IMPORT_WITH_A_GPU, ROOT)
    assert done.returncode == 0, done.stderr


def test_unknown_command(capsys) -> None:
    with pytest.raises(SystemExit):
        cli.main(["nonsense"])
    assert "nonsense" in capsys.readouterr().err


WITHOUT_EXTENSION = """
import warnings, torch
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import fastbcd
    assert not caught, [str(w.message) for w in caught]
    x = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    mask = torch.tensor([True, False])
    for _ in range(3):
        y = fastbcd.ops.masked_relu(x, mask)
        y.sum().backward()
        fastbcd.ops.masked_poly(x, mask, torch.ones(3)).sum().backward()
assert y.tolist() == [[0.0, -2.0]], y
messages = [str(w.message) for w in caught if "reference" in str(w.message)]
print(len(messages), messages[0])
"""


def copied_package(tmp_path: Path) -> Path:
    """The sources as a plain package, without the compiled extension."""
    package = tmp_path / "fastbcd"
    shutil.copytree(ROOT / "fastbcd", package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(
        ROOT / "kernels", package / "kernels",
        ignore=shutil.ignore_patterns("*.so", "build.json", "__pycache__"),
    )  # fmt: skip
    return package


def run_python(code: str, path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(path), **env}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=path
    )


def test_without_the_extension_the_reference_runs_and_says_so_once(tmp_path) -> None:
    package = copied_package(tmp_path)
    reason = "compiling failed (command 'g++' failed)"
    (package / "kernels" / "cpu" / "build.json").write_text(json.dumps({"reason": reason}))
    done = run_python(WITHOUT_EXTENSION, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1 ")
    assert reason in done.stdout


def test_a_broken_extension_says_why(tmp_path) -> None:
    package = copied_package(tmp_path)
    (package / "kernels" / "cpu" / "_kernels.abi3.so").write_bytes(b"not a library")
    done = run_python(WITHOUT_EXTENSION, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "_kernels.abi3.so" in done.stdout


def test_without_triton_everything_else_runs(tmp_path) -> None:
    copied_package(tmp_path)
    (tmp_path / "triton.py").write_text("raise ImportError('no triton here')\n")
    code = "import fastbcd; print(fastbcd.backends()[1].reason)"
    done = run_python(code, tmp_path, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    assert "no triton here" in done.stdout


def build(source: Path, **env: str) -> dict:
    """Run setup.py's own build of the extension; its report."""
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--build-lib", "out", "--build-temp", "tmp"],
        cwd=source, capture_output=True, text=True, env={**os.environ, **env},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    installed = source / "out" / "fastbcd" / "kernels" / "cpu"
    return json.loads((installed / "build.json").read_text())


def copied_project(tmp_path: Path) -> Path:
    """What a wheel is built from, without what was built before."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    ignored = shutil.ignore_patterns("*.so", "build.json", "__pycache__")
    for name in ("fastbcd", "kernels"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    return tmp_path


def test_a_build_without_a_compiler_goes_on_and_keeps_the_reason(tmp_path) -> None:
    source = copied_project(tmp_path)
    report = build(source, CC="/nonexistent/gcc", CXX="/nonexistent/g++")
    assert report["built"] is False
    assert "nonexistent" in report["reason"]
    assert not list(tmp_path.rglob("*.so"))


def test_everything_is_installed(tmp_path) -> None:
    """Every module of every package, the type marker, the data, and the licences."""
    source = copied_project(tmp_path)
    done = subprocess.run(
        [sys.executable, "setup.py", "build_py", "--build-lib", "out", "dist_info"],
        cwd=source, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    built = source / "out" / "fastbcd"
    assert {p.relative_to(built) for p in built.rglob("*") if p.is_file()} >= {
        *(p.relative_to(source / "fastbcd") for p in (source / "fastbcd").rglob("*.*")),
        *(p.relative_to(source) for p in (source / "kernels").rglob("*.py")),
    }
    assert (built / "py.typed").exists()
    (metadata,) = source.glob("*.dist-info/METADATA")
    assert "License-Expression: MIT" in metadata.read_text()
    licences = [p.name for p in (metadata.parent / "licenses").rglob("*") if p.is_file()]
    assert sorted(licences) == ["LICENSE", "NOTICE-fashion-mnist.txt"]

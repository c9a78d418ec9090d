"""Build the C++ kernels against torch's stable ABI, without importing torch.

Only torch's headers and libraries are needed, so this also works inside pip's isolated build,
where torch cannot be imported but lies in the environment that is being installed into. If
torch or a compiler is missing the package installs without the extension, and
`kernels/cpu/build.json` holds the reason, which `python -m fastbcd.info` prints.

With ninja, files compile in parallel and only those that changed; without it, all of them, one
after the other.
"""

import functools
import importlib.util
import json
import shlex
import shutil
import site
import subprocess
import sysconfig
from glob import glob
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).parent


def find_torch() -> Path | None:
    """The installed torch package: importable, or in the site-packages of this interpreter."""
    spec = importlib.util.find_spec("torch")
    if spec and spec.origin:
        return Path(spec.origin).parent
    places = [sysconfig.get_path("platlib"), sysconfig.get_path("purelib")]
    places.append(site.getusersitepackages())
    found = [
        Path(p) / "torch" for p in places if (Path(p) / "torch" / "include").is_dir()
    ]
    return found[0] if found else None


def find_ninja() -> str | None:
    """The ninja program: on the PATH, or installed beside this interpreter."""
    return shutil.which("ninja") or shutil.which(
        "ninja", path=sysconfig.get_path("scripts")
    )


def compile_by_ninja(ninja: str, compiler, sources: list[str], **options) -> list[str]:
    """Do what `compiler.compile(sources, **options)` does, by a ninja file in the output folder."""
    folder = Path(options["output_dir"])
    lines = [f"builddir = {folder}", "rule cxx", "  command = $command", "  deps = gcc",
             "  depfile = $out.d"]  # fmt: skip

    def write_rule(output, source, extension, before, after, preprocessor) -> None:
        command = [*compiler.compiler_so_cxx, *before, source, "-o", output, *after]
        command += ["-MMD", "-MF", f"{output}.d"]
        line = shlex.join(command).replace("$", "$$")
        lines.extend([f"build {output}: cxx {source}", f"  command = {line}"])

    compiler._compile = write_rule  # compile() calls it for each source
    objects = type(compiler).compile(compiler, sources, **options)
    (folder / "build.ninja").write_text("\n".join(lines) + "\n")
    if subprocess.run([ninja, "-f", str(folder / "build.ninja")]).returncode:
        raise RuntimeError(f"command {compiler.compiler_so_cxx[0]!r} failed")
    return objects


class BuildKernels(build_ext):
    """Build the extension if possible; otherwise record why not, and let the install continue."""

    def run(self) -> None:
        inplace = self.inplace  # a failed build changes it
        reason = self.build_or_reason()
        built = Path(self.build_lib) / "fastbcd" / "kernels" / "cpu"
        place = HERE / "kernels" / "cpu" if inplace else built
        place.mkdir(parents=True, exist_ok=True)
        report = json.dumps({"built": reason is None, "reason": reason})
        (place / "build.json").write_text(report + "\n")
        if reason:
            print(f"fastbcd: C++ kernels not built: {reason}")
            self.extensions = []  # nothing to copy or to list as an output

    def build_or_reason(self) -> str | None:
        torch_dir = find_torch()
        if torch_dir is None:
            return "no torch was found at build time; pip install torch, then fastbcd again"
        for extension in self.extensions:
            extension.include_dirs += [str(torch_dir / "include")]
            extension.library_dirs += [str(torch_dir / "lib")]
        try:
            super().run()
        except (
            Exception
        ) as error:  # a compiler fails in many ways; none may stop the install
            return f"compiling failed ({error}); install a C++20 compiler (g++), then fastbcd again"
        return None

    def build_extensions(self) -> None:
        ninja = find_ninja()
        if ninja and self.compiler.compiler_type == "unix":
            self.build_temp = (
                "build/ninja"  # stays, also where pip builds in a temporary folder
            )
            self.force = True  # ninja finds out what changed
            self.compiler.compile = functools.partial(
                compile_by_ninja, ninja, self.compiler
            )
        super().build_extensions()


setup(
    packages=[
        *find_packages(include=["fastbcd*"]),
        *(f"fastbcd.{name}" for name in find_packages(include=["kernels*"])),
    ],
    ext_modules=[
        Extension(
            "fastbcd.kernels.cpu._kernels",
            sources=sorted(glob("kernels/cpu/*.cpp", root_dir=HERE)),
            depends=[str(p) for p in sorted((HERE / "kernels" / "cpu").glob("*.h"))],
            libraries=["torch_cpu", "c10"],
            # No fused multiply-add: every backend rounds as the reference does.
            extra_compile_args=["-O3", "-g0", "-std=c++20", "-ffp-contract=off", "-fno-math-errno",
                                "-fno-trapping-math", "-Wno-attributes"],
            define_macros=[("TORCH_TARGET_VERSION", "0x020a000000000000"),
                           ("Py_LIMITED_API", "0x030a0000")],
            py_limited_api=True,
            language="c++",
        )
    ],
    cmdclass={"build_ext": BuildKernels},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)  # fmt: skip

"""Compiler, flags and DaCe's configuration."""

import json
import os
import shlex
import threading
from pathlib import Path

import dace
import numpy as np
import pytest
from dace.config import Config

from stepdown.models.errors import BuildError, OptionError
from stepdown.pipeline import toolchain
from stepdown.pipeline.toolchain import (
    Optimize,
    cmake_executable,
    compile_flags,
    dace_configuration,
    default_isa,
    find_compiler,
    host_isa,
    isa_of,
    ninja_executable,
    toolchain_identity,
)

V2 = "cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3"
V3 = f"{V2} abm avx avx2 bmi1 bmi2 f16c fma movbe xsave"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"


def fake_compiler(path: Path, macros: str) -> Path:
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{macros}\nEND\n")
    path.chmod(0o755)
    return path


def test_the_compiler_is_found_and_named() -> None:
    compiler = find_compiler()
    assert compiler.path.is_absolute()
    assert int(compiler.version.split(".")[0]) >= toolchain.OLDEST[compiler.family]
    assert compiler.version in str(compiler)


def test_cxx_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    macros = "#define __GNUC__ 4\n#define __clang__ 1\n#define __clang_major__ 17\n#define __clang_minor__ 0\n"
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path / "mine", macros + "#define __clang_patchlevel__ 6")))
    compiler = find_compiler()
    assert (compiler.path, compiler.family, compiler.version) == (tmp_path / "mine", "clang", "17.0.6")


def test_a_missing_compiler_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r'^No C\+\+ compiler was found: looked for "g\+\+", .*"CXX"\.$'):
        find_compiler()
    with pytest.raises(BuildError, match=r"^No C\+\+ compiler was found"), dace_configuration("light"):
        pytest.fail("the configuration must not be entered without a compiler")


def test_a_wrong_cxx_is_not_replaced_by_another_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match='"no-such-compiler"'):
        find_compiler()


@pytest.mark.parametrize(
    ("macros", "message"),
    [
        ("#define __GNUC__ 8\n#define __GNUC_MINOR__ 3\n#define __GNUC_PATCHLEVEL__ 0", "has version 8.3.0; accepted"),
        ("#define _MSC_VER 1930", "neither GCC nor Clang"),
    ],
)
def test_an_unsuitable_compiler_is_refused(
    macros: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path / "unsuitable", macros)))
    with pytest.raises(BuildError, match=message):
        find_compiler()


def test_a_broken_compiler_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(BuildError, match="does not work as a C\\+\\+ compiler"):
        find_compiler()


@pytest.mark.parametrize(
    ("flags", "isa"),
    [
        ("", "generic"),
        ("sse sse2", "generic"),
        (V2, "x86-64-v2"),
        (f"{V2} avx avx2", "x86-64-v2"),
        (V3, "x86-64-v3"),
        (f"{V3} avx512f avx512vl", "x86-64-v3"),
        (V4, "x86-64-v4"),
        (V4.replace("popcnt ", ""), "generic"),
    ],
)
def test_the_instruction_set_is_the_highest_complete_level(flags: str, isa: str) -> None:
    assert isa_of(frozenset(flags.split())) == isa


def test_cpuinfo_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {V4}\nvmx flags\t: x\nprocessor\t: 1\n")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert host_isa(cpuinfo) == "x86-64-v4"
    assert host_isa(tmp_path / "missing") == "generic"
    monkeypatch.setattr(toolchain, "host_isa", lambda: "x86-64-v4")
    assert default_isa() == "x86-64-v3"
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert host_isa(cpuinfo) == "generic"


@pytest.mark.parametrize(("optimize", "level"), [("release", "-O3"), ("light", "-O1")])
def test_flags_are_safe_to_carry_and_keep_nan(optimize: Optimize, level: str) -> None:
    flags = compile_flags(optimize, "x86-64-v3")
    assert level in flags
    assert "-march=x86-64-v3" in flags
    assert len([flag for flag in flags if flag.startswith("-O")]) == 1
    banned = {"-march=native", "-ffast-math", "-Ofast", "-freciprocal-math", "-ffinite-math-only"}
    assert not banned & set(flags)
    assert not [flag for flag in compile_flags(optimize, "generic") if flag.startswith("-m")]


def test_unknown_options_are_refused() -> None:
    with pytest.raises(OptionError, match='optimize "fast" is unknown; accepted are "release" and "light"'):
        compile_flags("fast")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match='isa "native" is unknown; accepted are "generic"'):
        compile_flags("release", "native")  # type: ignore[arg-type]


def test_the_identity_changes_with_flags_and_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release, light = toolchain_identity("release"), toolchain_identity("light")
    assert release != light
    assert toolchain_identity("release", "generic") != toolchain_identity("release", "x86-64-v3")
    json.dumps(release)
    macros = "#define __GNUC__ 99\n#define __GNUC_MINOR__ 0\n#define __GNUC_PATCHLEVEL__ 1"
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path / "newer", macros)))
    assert toolchain_identity("release")["compiler"] == "gnu 99.0.1"


def test_cmake_and_ninja_are_pips() -> None:
    assert "cmake" in cmake_executable().parts
    assert cmake_executable().is_file()
    assert ninja_executable().is_file()


def test_the_configuration_is_the_projects_and_goes_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Config.set("compiler", "build_type", value="Debug")
    Config.set("optimizer", "autotile_size", value=7)
    path = os.environ["PATH"]
    with dace_configuration("release", build_folder=tmp_path):
        assert Config.get("compiler", "cpu", "args") == shlex.join(compile_flags("release"))
        assert Config.get("compiler", "build_type") == "None"
        assert Config.get("optimizer", "autotile_size") == 128, "a user's settings must not change generated code"
        assert Config.get("cache") == "unique"
        assert Config.get("default_build_folder") == str(tmp_path)
        assert os.environ["PATH"].startswith(str(cmake_executable().parent))
        with dace_configuration("light"):
            assert Config.get("compiler", "cpu", "args") == shlex.join(compile_flags("light"))
            inner = Path(Config.get("default_build_folder"))
            assert inner.is_dir()
        assert not inner.exists()
        assert Config.get("compiler", "cpu", "args") == shlex.join(compile_flags("release"))
    assert Config.get("compiler", "build_type") == "Debug"
    assert Config.get("optimizer", "autotile_size") == 7
    assert os.environ["PATH"] == path
    Config.set("compiler", "build_type", value="None")
    Config.set("optimizer", "autotile_size", value=128)


def test_the_configuration_goes_away_after_an_error() -> None:
    before = Config.get("compiler", "cpu", "args")
    with pytest.raises(KeyError), dace_configuration("release"):
        raise KeyError
    assert Config.get("compiler", "cpu", "args") == before


def test_one_thread_at_a_time() -> None:
    inside, order = threading.Event(), []

    def other() -> None:
        inside.wait()
        with dace_configuration("light"):
            order.append("other")

    thread = threading.Thread(target=other)
    thread.start()
    with dace_configuration("light"):
        inside.set()
        thread.join(timeout=0.3)
        order.append("first")
    thread.join()
    assert order == ["first", "other"]


def test_dace_compiles_with_exactly_these_flags(tmp_path: Path) -> None:
    size = dace.symbol("size")
    with dace_configuration("light", build_folder=tmp_path):
        Config.set("compiler", "command_cache", value=False)  # a replayed build leaves no list of commands
        sdfg = dace.SDFG("toolchain_probe")
        sdfg.add_array("source", [size], dace.float32)
        sdfg.add_array("target", [size], dace.float32)
        state = sdfg.add_state()
        state.add_mapped_tasklet(
            "double",
            {"i": "0:size"},
            {"a": dace.Memlet("source[i]")},
            "b = a * 2",
            {"b": dace.Memlet("target[i]")},
            external_edges=True,
        )
        compiled = sdfg.compile()
    source, target = np.arange(5, dtype=np.float32), np.zeros(5, np.float32)
    compiled(source=source, target=target, size=5)
    assert target.tolist() == [0, 2, 4, 6, 8]

    (flags_file,) = tmp_path.rglob("build.ninja")
    commands = flags_file.read_text()
    assert " ".join(compile_flags("light")) in commands
    assert "-march=native" not in commands
    assert "-freciprocal-math" not in commands
    assert "-O3" not in commands

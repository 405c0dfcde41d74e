"""The extension of PyTorch: compiled once, kept, and what happens when that fails."""

import subprocess
import threading
from pathlib import Path

import pytest
import torch

from stepdown.models.errors import BuildError
from stepdown.pipeline.cache import BuildCache
from stepdown.pipeline.runtime import extension
from stepdown.pipeline.runtime.extension import SOURCE, TORCH, build_extension, extension_key, load_extension
from stepdown.pipeline.toolchain import extension_flags, find_compiler


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source that compiles in no time, in place of the real one."""
    path = tmp_path / "extension.cpp"
    path.write_text("int answer() { return 42; }\n")
    monkeypatch.setattr(extension, "SOURCE", path)
    return path


def test_it_is_compiled_once(source: Path, tmp_path: Path) -> None:
    cache = BuildCache(tmp_path / "cache")
    said: list[str] = []
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(build_extension(cache, progress=said.append))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said == ["extension"]
    assert len(found) == 4
    assert len(set(found)) == 1
    assert found[0].is_file()
    (entry,) = cache.list()
    assert entry.description == f"PyTorch extension for PyTorch {torch.__version__}"


def test_another_source_is_another_extension(source: Path) -> None:
    before = extension_key()
    source.write_text("int answer() { return 43; }\n")
    assert extension_key() != before


def test_another_pytorch_is_another_extension(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = extension_key()
    monkeypatch.setattr(torch, "__version__", "2.99")
    assert extension_key() != before


def test_a_source_that_does_not_compile(source: Path, tmp_path: Path) -> None:
    cache = BuildCache(tmp_path / "cache")
    source.write_text("int answer() { return unknown; }\n")
    with pytest.raises(BuildError, match=r"did not compile for PyTorch 2.*error: .unknown. was not") as caught:
        build_extension(cache)
    assert "\n" not in str(caught.value)
    assert cache.list() == ()


def test_a_library_that_cannot_be_loaded(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPDOWN_CACHE", str(tmp_path / "cache"))
    source.write_text("int missing(); int answer() { return missing(); }\n")
    with pytest.raises(BuildError, match=r"extension .* cannot be loaded: .*undefined symbol"):
        load_extension.__wrapped__()


def test_the_headers_of_python_are_not_needed() -> None:
    flags = [flag for flag in extension_flags(torch.compiled_with_cxx11_abi()) if flag != "-shared"]
    command = [str(find_compiler().path), *flags, "-M", f"-isystem{TORCH / 'include'}", str(SOURCE)]
    needed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert any(file.endswith("torch/custom_class.h") for file in needed)
    assert [file for file in needed if file.endswith(("/Python.h", "torch/extension.h", "torch/all.h"))] == []


def test_pytorch_says_which_abi() -> None:
    assert "-D_GLIBCXX_USE_CXX11_ABI=1" in extension_flags(True)
    assert "-D_GLIBCXX_USE_CXX11_ABI=0" in extension_flags(False)

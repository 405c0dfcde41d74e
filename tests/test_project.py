"""The project itself: imports, packaging, version ranges, and the rules that no linter knows."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import stepdown

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("models", "transformations", "pipeline")
"""In the order of imports: each may import itself and those before it."""

SOURCE_FOLDERS = ("src", *LAYERS)
CODE_FOLDERS = (*SOURCE_FOLDERS, "tests", "tools")
MAX_LINES = 600

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]


def python_files(*folders: str) -> list[Path]:
    return sorted(
        path for folder in folders for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts
    )


def imported_modules(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """Line and absolute name of every module that ``tree`` imports, wherever the statement stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [base])])
            yield node.lineno, base
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def violations(source: str, layer: str, package: str) -> list[str]:
    """The imports in ``source``, a module of ``layer``, that go against the order, or use a folder's bare name."""
    allowed = LAYERS[: LAYERS.index(layer) + 1]
    found = []
    for line, module in imported_modules(ast.parse(source), package):
        parts = module.split(".")
        if parts[0] in LAYERS:
            found.append(f"{line}: {module} must be imported as stepdown.{module}")
        elif parts[0] == "stepdown" and len(parts) > 1 and parts[1] in LAYERS and parts[1] not in allowed:
            found.append(f"{line}: {layer} must not import {module}")
    return found


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_go_one_way(layer: str) -> None:
    found = []
    for path in python_files(layer):
        package = "stepdown." + ".".join(path.relative_to(ROOT).parent.parts)
        found += [f"{path.relative_to(ROOT)}:{text}" for text in violations(path.read_text(), layer, package)]
    assert found == []


@pytest.mark.parametrize(
    ("source", "layer", "number"),
    [
        ("import stepdown.models.errors", "transformations", 0),
        ("from stepdown.models import errors", "pipeline", 0),
        ("import stepdown.pipeline", "transformations", 1),
        ("from stepdown.pipeline.cache import BuildCache", "models", 2),
        ("from stepdown import transformations", "models", 1),
        ("from ..transformations import differentiate", "models", 2),
        ("from . import errors", "models", 0),
        ("def f():\n    import stepdown.pipeline.cache", "models", 1),
        ("import pipeline", "pipeline", 1),
        ("from models.errors import StepdownError", "models", 2),
    ],
)
def test_the_import_check_sees_what_it_should(source: str, layer: str, number: int) -> None:
    assert len(violations(source, layer, f"stepdown.{layer}")) == number


def test_tests_do_not_import_folders_by_their_bare_name() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {module}"
        for path in python_files("tests", "tools", "src")
        for line, module in imported_modules(ast.parse(path.read_text()), "")
        if module.split(".")[0] in LAYERS
    ]
    assert found == []


def test_ruff_bans_the_bare_names() -> None:
    banned = PROJECT["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]
    assert set(banned) == set(LAYERS)
    for layer in LAYERS:
        result = subprocess.run(
            [sys.executable, "-m", "ruff", "check", "--stdin-filename", "tests/x.py", "--select", "TID251", "-"],
            input=f"import {layer}\n",
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        assert result.returncode == 1
        assert "TID251" in result.stdout


def test_importing_the_root_package_is_light() -> None:
    """``import stepdown`` gives the version without PyTorch and DaCe."""
    code = "import sys, stepdown; print(stepdown.__version__, 'torch' in sys.modules, 'dace' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert result.stdout.split() == [stepdown.__version__, "False", "False"]


# Packaging


def packages_in_the_tree() -> set[str]:
    folders = {path.parent.relative_to(ROOT) for path in python_files(*LAYERS)}
    return {"stepdown", *("stepdown." + ".".join(folder.parts) for folder in folders)}


def test_every_folder_with_code_is_listed_and_is_a_package() -> None:
    assert set(SETUPTOOLS["packages"]) == packages_in_the_tree()
    without_init = [name for name in packages_in_the_tree() if not (folder_of(name) / "__init__.py").is_file()]
    assert without_init == []


def folder_of(package: str) -> Path:
    if package == "stepdown":
        return ROOT / "src" / "stepdown"
    return ROOT.joinpath(*package.split(".")[1:])


def data_files() -> set[str]:
    """Installed names of the data files in the tree."""
    patterns = {Path(pattern).name for pattern in SETUPTOOLS["package-data"]["*"]}
    found = {
        "stepdown/" + path.relative_to(ROOT).as_posix()
        for layer in LAYERS
        for path in (ROOT / layer).rglob("*")
        if path.is_file() and any(path.match(pattern) for pattern in patterns)
    }
    return found | {"stepdown/py.typed"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the tree, with a header, a script and a page added in places that have none."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in SOURCE_FOLDERS:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ADDED_DATA:
        path = tree.joinpath(*name.split("/")[1:])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("data")
    result = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(tree)],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    (built,) = folder.glob("*.whl")
    return built


ADDED_DATA = (
    "stepdown/transformations/lowering/cpu/added.h",
    "stepdown/transformations/lowering/cpu/include/deep/added.hpp",
    "stepdown/pipeline/analysis/page/added.html",
    "stepdown/pipeline/analysis/page/added.js",
    "stepdown/pipeline/analysis/page/added.css",
    "stepdown/models/added.json",
)


def test_the_wheel_holds_every_module_and_data_file(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    modules = {f"stepdown/{path.relative_to(ROOT).as_posix()}" for path in python_files(*LAYERS)}
    expected = modules | {"stepdown/__init__.py"} | data_files() | set(ADDED_DATA)
    assert expected - names == set()
    strangers = {name for name in names if not name.startswith(("stepdown/", f"stepdown-{stepdown.__version__}."))}
    assert strangers == set(), "nothing may be installed beside the package"


def test_the_wheel_works_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    code = (
        "import stepdown, stepdown.models.errors, stepdown.pipeline.cache\n"
        "import stepdown.transformations.lowering.cpu as cpu\n"
        "print(stepdown.__file__, cpu.__file__, stepdown.pipeline.cache.sources_digest(), sep='\\n')"
    )
    environment = {**os.environ, "PYTHONPATH": str(site)}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment, check=True
    )
    root, sub_package, digest = result.stdout.split()
    assert root == str(site / "stepdown" / "__init__.py")
    assert sub_package == str(site / "stepdown" / "transformations" / "lowering" / "cpu" / "__init__.py")
    assert re.fullmatch("[0-9a-f]{64}", digest)


def test_type_checkers_see_the_installed_names() -> None:
    links = ROOT / "typings" / "stepdown"
    assert (links / "__init__.py").resolve() == ROOT / "src" / "stepdown" / "__init__.py"
    for layer in LAYERS:
        assert (links / layer).is_symlink()
        assert not (links / layer).readlink().is_absolute()
        assert (links / layer).resolve() == ROOT / layer


def test_the_command_is_installed() -> None:
    assert PROJECT["project"]["scripts"] == {"stepdown": "stepdown.pipeline.cli:main"}


# Versions


def requirements() -> dict[str, Requirement]:
    lines = list(PROJECT["project"]["dependencies"])
    for extra in PROJECT["project"]["optional-dependencies"].values():
        lines += extra
    return {requirement.name: requirement for requirement in map(Requirement, lines)}


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


@pytest.mark.parametrize(
    ("name", "version"),
    [("dace", "2.0.0b1"), ("torch", "2.11.0"), ("torch", "2.13.0"), ("numpy", "2.4.6"), ("numpy", "2.5.0")],
)
def test_ranges_admit_the_versions_in_use(name: str, version: str) -> None:
    # pip admits pre-releases where the range itself names one.
    assert requirements()[name].specifier.contains(version)


@pytest.mark.parametrize("version", ["3.11.0", "3.11.7", "3.12.0", "3.12.9"])
def test_the_range_of_pythons(version: str) -> None:
    assert Version(version) in SpecifierSet(PROJECT["project"]["requires-python"])


def test_dace_1_is_refused() -> None:
    """It has neither ``dace.autodiff`` nor bfloat16."""
    assert not requirements()["dace"].specifier.contains("1.0.2")


def test_the_tested_versions_are_exact_and_within_the_ranges() -> None:
    versions = pinned()
    for name, requirement in requirements().items():
        if name in versions:
            assert requirement.specifier.contains(versions[name], prereleases=True), name
    base = {requirement.name for requirement in map(Requirement, PROJECT["project"]["dependencies"])}
    assert base - set(versions) == set()
    assert not [version for version in versions.values() if "+" in version], "local versions exist on one machine only"


def test_a_base_install_brings_blas_and_build_tools() -> None:
    base = {requirement.name for requirement in map(Requirement, PROJECT["project"]["dependencies"])}
    assert {"dace", "numpy", "torch", "onnx", "scipy-openblas32", "cmake", "ninja"} <= base
    assert not {"transformers", "matplotlib", "tokenizers"} & base


def test_everything_imported_is_required() -> None:
    """Third-party modules imported at the top of a module are dependencies; optional ones sit in extras."""
    names = {"scipy_openblas32": "scipy-openblas32", "mpl_toolkits": "matplotlib", "yaml": "pyyaml"}
    required = set(requirements())
    missing = set()
    for path in python_files(*SOURCE_FOLDERS):
        for _, module in imported_modules(ast.parse(path.read_text()), "stepdown"):
            top = module.split(".")[0]
            if top and top not in sys.stdlib_module_names and top != "stepdown" and names.get(top, top) not in required:
                missing.add(f"{path.relative_to(ROOT)}: {top}")
    assert missing == set()


# Files


def test_no_file_is_too_long() -> None:
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in python_files(*CODE_FOLDERS)
    }
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_every_public_module_class_and_function_has_a_docstring() -> None:
    missing = []
    for path in python_files(*SOURCE_FOLDERS):
        tree = ast.parse(path.read_text())
        if not ast.get_docstring(tree):
            missing.append(f"{path.relative_to(ROOT)}")
        for node in tree.body:
            kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
            if isinstance(node, kinds) and not node.name.startswith("_") and not ast.get_docstring(node):
                missing.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}")
    assert missing == []


def test_make_and_ci_agree() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in ("run", "test", "lint", "fuzz", "clean"):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    ci = ROOT / ".ci" / "run"
    assert os.access(ci, os.X_OK)
    assert "make lint" in ci.read_text()
    assert "make test" in ci.read_text()

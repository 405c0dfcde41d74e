"""Fixtures of the whole suite: a strict DaCe, a build cache of its own, and a bounded number of threads."""

import contextlib
import copy
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Before NumPy, PyTorch and DaCe read them. Two threads make races visible and fit small machines; waiting threads must
# sleep, because pytest-xdist runs several processes at once.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "2")
os.environ.setdefault("MKL_NUM_THREADS", "2")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import dace
import pytest
import torch
from dace.config import Config

from stepdown.pipeline.cache import BuildCache
from stepdown.pipeline.runtime.extension import build_extension, extension_key
from stepdown.pipeline.toolchain import build_environment, configure_dace, preserved_dace_configuration

torch.set_num_threads(2)

# What takes long to make and has a name made from all that goes into it stays from run to run.
KEPT = Path(tempfile.gettempdir()) / f"stepdown-tests-{os.getuid()}"


@pytest.fixture(scope="session", autouse=True)
def session_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A temporary folder of this run, shared by all worker processes of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session", autouse=True)
def session_cache(session_folder: Path) -> Iterator[Path]:
    """The build cache of this run (``STEPDOWN_CACHE``): shared by its workers, never the user's.

    It holds the runtime's extension, which stays from run to run.
    """
    cache = session_folder / "stepdown-cache"
    entry = cache / "entries" / extension_key()
    entry.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        entry.symlink_to(build_extension(BuildCache(KEPT / "cache")).parent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STEPDOWN_CACHE", str(cache))
        yield cache


@pytest.fixture(scope="session", autouse=True)
def strict_dace_session(session_folder: Path) -> Iterator[None]:
    """DaCe as the project configures it, with the light flags: no name-matched builds, exceptions in matches raised.

    Session scope, so that fixtures which compile something once see it as well. DaCe's precompiled headers stay from
    run to run: they take ten seconds each, and their names are made from all that goes into them.
    """
    with pytest.MonkeyPatch.context() as patch, preserved_dace_configuration():
        patch.setenv("DACE_BUILD_CACHE_DIR", os.environ.get("DACE_BUILD_CACHE_DIR", str(KEPT)))
        for name, value in build_environment().items():
            patch.setenv(name, value)
        configure_dace("light", build_folder=session_folder / f"dace-{os.getpid()}")
        yield


@pytest.fixture(autouse=True)
def strict_dace(strict_dace_session: None) -> Iterator[None]:
    """Fails a test that leaves DaCe's configuration changed, and puts it back for the next one."""
    before = copy.deepcopy(Config._data._config)
    yield
    after, Config._data._config = Config._data._config, before
    assert after == before, "the test, or what it called, left DaCe's configuration changed"


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test starts from the same PyTorch generator state."""
    torch.manual_seed(0)


def pytest_report_header() -> str:
    """The versions that matter, at the top of every report."""
    return f"dace {dace.__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads"

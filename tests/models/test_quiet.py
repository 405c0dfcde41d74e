"""DaCe's warnings are kept back, in the threads and for the time that ask for it; all others come through."""

import copy
import pickle
import threading
import warnings
from collections.abc import Callable

import pytest

from stepdown.models import quiet
from stepdown.models.quiet import quiet_dace


def warn_from(module: str, text: str = "noise", category: type[Warning] = UserWarning) -> None:
    """Warn as a line of ``module`` does."""
    warnings.warn_explicit(text, category, f"{module}.py", 1, module)


@pytest.mark.parametrize("module", ["dace", "dace.sdfg.nodes"])
@pytest.mark.parametrize("category", [UserWarning, DeprecationWarning, RuntimeWarning])
def test_daces_warnings_are_ignored_inside_only(module: str, category: type[Warning]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with quiet_dace():
            warn_from(module, category=category)
        with pytest.raises(category):
            warn_from(module, category=category)


@pytest.mark.parametrize("module", ["stepdown.pipeline.compiler", "__main__", "daceful", "mine.dace.tools"])
def test_other_warnings_come_through(module: str) -> None:
    with quiet_dace(), pytest.warns(UserWarning, match="wanted"):
        warn_from(module, "wanted")


def test_filters_are_left_as_they_were_found_and_keep_what_is_added() -> None:
    before = copy.copy(warnings.filters)
    with quiet_dace(), quiet_dace():
        assert [entry for entry in warnings.filters if entry is quiet._FILTER] == [quiet._FILTER]
        warnings.filterwarnings("ignore", message="added meanwhile")
    added, *rest = warnings.filters
    assert rest == list(before)
    assert str(added[1]).find("added meanwhile") >= 0


def test_an_inner_use_comes_before_filters_added_since() -> None:
    with quiet_dace(), warnings.catch_warnings():
        warnings.simplefilter("error")
        with quiet_dace():
            warn_from("dace.sdfg")


def test_an_error_ends_it() -> None:
    before = list(warnings.filters)
    with pytest.raises(KeyError), quiet_dace():
        raise KeyError
    assert list(warnings.filters) == before
    with pytest.warns(UserWarning):
        warn_from("dace.sdfg")


def in_thread(work: Callable[[], None]) -> None:
    """Run ``work`` in another thread and wait for it."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_other_threads_keep_daces_warnings() -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with quiet_dace():
            in_thread(lambda: warn_from("dace.sdfg", "somebody's own graph"))
            warn_from("dace.sdfg")
    assert [str(warning.message) for warning in shown] == ["somebody's own graph"]


def test_threads_may_overlap_in_any_order() -> None:
    first_is_inside, second_is_inside, first_has_left = (threading.Event() for _ in range(3))
    before = list(warnings.filters)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")

        def first() -> None:
            with quiet_dace():
                first_is_inside.set()
                second_is_inside.wait()
            first_has_left.set()

        def second() -> None:
            first_is_inside.wait()
            with quiet_dace():
                second_is_inside.set()
                first_has_left.wait()
                warn_from("dace.sdfg")

        threads = [threading.Thread(target=work) for work in (first, second)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert shown == []
        assert quiet._FILTER not in warnings.filters
    assert list(warnings.filters) == before


def test_what_was_shown_once_is_not_shown_again() -> None:
    """Python forgets what it has shown whenever ``catch_warnings`` is left."""
    registry: dict[object, object] = {}
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for _ in range(2):
            warnings.warn_explicit("once", UserWarning, "mine.py", 1, "mine", registry)  # type: ignore[arg-type]
            with quiet_dace():
                pass
    assert len(shown) == 1


def test_filters_stay_picklable() -> None:
    """Some libraries hand them over to other processes."""
    with quiet_dace():
        pickle.loads(pickle.dumps(list(warnings.filters)))

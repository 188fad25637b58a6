"""Errors that cross process boundaries: workers pickle them, and their message must survive."""

import pickle

import pytest

from spear.errors import InvalidUpdate, MissingExtra, SpearError


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (InvalidUpdate(["one thing", "another"]), {"problems": ("one thing", "another")}),
        (MissingExtra("ray", "cluster"), {"package": "ray", "extra": "cluster"}),
    ],
)
def test_errors_survive_the_way_back_from_a_worker(error, kept):
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert {name: getattr(back, name) for name in kept} == kept


def test_a_missing_package_names_the_cure():
    with pytest.raises(SpearError, match=r"pip install 'spear-fl\[cluster\]'"):
        raise MissingExtra("ray", "cluster")
    assert isinstance(MissingExtra("ray", "cluster"), ImportError)

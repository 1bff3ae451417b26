"""Profiles of small cases, traced once for the tests of estimates: few always, the others in slow tests."""

import functools

import pytest
from support.step_profiles import FEW, traced_profiles


@pytest.fixture(scope="session")
def profiles():
    return traced_profiles(list(FEW))


@pytest.fixture(scope="session")
def profile_of(request):
    """name -> Profile; beside the few, traces only what a chosen test asks for."""

    @functools.cache
    def of(name):
        found = request.getfixturevalue("profiles") if name in FEW else traced_profiles([name])
        return found[name]

    return of

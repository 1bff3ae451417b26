"""Profiles of small cases, traced once for the tests of estimates: few always, the others in slow tests."""

import pytest
from support.step_profiles import FEW, LAYOUTS, MORE, traced_profiles


@pytest.fixture(scope="session")
def profiles():
    return traced_profiles(list(FEW))


@pytest.fixture(scope="session")
def more_profiles():
    return traced_profiles(list(MORE))


@pytest.fixture(scope="session")
def layout_profiles():
    return traced_profiles(list(LAYOUTS))


@pytest.fixture(scope="session")
def profile_of(request):
    """name -> Profile; traces only what a chosen test asks for."""

    def of(name):
        fixtures = {"profiles": FEW, "more_profiles": MORE, "layout_profiles": LAYOUTS}
        (fixture,) = (fixture for fixture, cases in fixtures.items() if name in cases)
        return request.getfixturevalue(fixture)[name]

    return of

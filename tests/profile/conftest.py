"""Profiles of small cases, traced once for the tests of this room."""

import pytest
from support.traced import all_profiles


@pytest.fixture(scope="session")
def profiles():
    return all_profiles()

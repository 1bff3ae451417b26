"""A folder of labelled files for the tests of readers."""

import pytest
from support.tasks.labelled_files import Files


@pytest.fixture
def files(tmp_path):
    """Writes labelled files below `tmp_path` and reads them."""
    return Files(tmp_path)

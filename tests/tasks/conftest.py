import pytest
from support.labelled_files import Files


@pytest.fixture
def files(tmp_path):
    return Files(tmp_path)

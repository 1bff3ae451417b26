"""Tokenizers of every kind, loaded once."""

import pytest
from support.data.tokenizer_files import KIND_OF

from data_utils.tokenizers.tokenizer import TokenizerConfig, load_tokenizer


@pytest.fixture(scope="session")
def loaded(tokenizer_files):
    """Every tokenizer by the name of its directory."""
    return {
        n: load_tokenizer(TokenizerConfig(kind=k, path=str(tokenizer_files / n))) for n, k in KIND_OF.items()
    }

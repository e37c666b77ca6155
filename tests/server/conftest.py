"""The official vocabulary, where it is at hand, and the vectors of model outputs."""

import json
import os
from pathlib import Path

import pytest

from k3lib.server.tokenizer import load_tokenizer


@pytest.fixture(scope="session")
def official():
    default = Path(__file__).parents[2] / "../shared/data/tokenizer"
    folder = Path(os.environ.get("K3LIB_TOKENIZER_DIR", default))
    if not (folder / "tiktoken.model").is_file():
        pytest.skip("needs the official tiktoken.model, set K3LIB_TOKENIZER_DIR")
    return load_tokenizer(folder)


@pytest.fixture
def outputs(golden):
    return json.loads((golden / "protocol/output_parse.json").read_text(encoding="utf-8"))

"""Ops never read uninitialised memory: here it holds NaN."""

import pytest

from k3lib.testing import fill_nan


@pytest.fixture(autouse=True)
def nan_filled_memory():
    with fill_nan():
        yield

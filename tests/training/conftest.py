"""Makes `training` importable: it lies at the root of the repository and is not part of the package."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

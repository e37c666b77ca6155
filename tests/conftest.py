"""Seeds, hypothesis profiles, the device, and the golden vectors."""

import json
import os
import pathlib

import hypothesis
import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start too

import torch
from safetensors import safe_open

from k3lib.ops import Target
from k3lib.server.tiny import make_tiny

hypothesis.settings.register_profile("dev", deadline=None, max_examples=12)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=12, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=400)
hypothesis.settings.load_profile(os.environ.get("K3LIB_HYPOTHESIS") or ("ci" if os.environ.get("CI") else "dev"))

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def device():
    """Where the tests of implementations put their tensors."""
    return {"cuda": "cuda", "rocm": "cuda", "npu": "npu", "cpu": "cpu"}[Target.detect().platform]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """The tiny model of random weights, for tests that need any model, quickly."""
    return make_tiny(tmp_path_factory.mktemp("tiny"), mxfp4=False)


@pytest.fixture(scope="session")
def golden():
    """Folder of the golden vectors and models."""
    given = os.environ.get("K3LIB_GOLDEN_DIR")
    folder = pathlib.Path(given) if given else REPOSITORY.parent / "shared" / "golden"
    if not folder.is_dir():
        pytest.skip(f"needs the golden vectors: set K3LIB_GOLDEN_DIR, {folder} is not a folder")
    return folder


class Golden:
    """The cases of one file of golden vectors."""

    def __init__(self, path):
        with safe_open(path, "pt") as file:
            self.metadata = file.metadata()
            self.tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
        self.noise = json.loads(self.metadata.get("fp32_vs_fp64_max_abs", "{}"))

    def case(self, name):
        """Tensors of a case, without its name."""
        return {key[len(name) + 1 :]: x for key, x in self.tensors.items() if key.startswith(f"{name}.")}

    def fact(self, name, default=None):
        """A JSON scalar of the metadata."""
        return json.loads(self.metadata[name]) if name in self.metadata else default

    def check(self, case, result, got, *, atol, rtol=0.0, ulps=0.5):
        """Compare with the fp64 value: the larger of `atol` and ten times the noise of fp32; bf16 may round besides.

        Args:
            case, result: `<case>.out64.<result>` is expected.
            got: what was computed.
            atol, rtol: from the table of the golden documents.
            ulps: units in the last place that a bf16 result may be off in addition.
        """
        want = self.tensors[f"{case}.out64.{result}"]
        assert got.shape == want.shape, f"{case}.{result}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
        # of a bf16 result the file knows the rounding of the official code, not the noise of fp32
        rounded = self.tensors[f"{case}.out.{result}"].dtype == torch.bfloat16
        allowed = max(atol, 0.0 if rounded else 10 * self.noise[f"{case}.{result}"]) + rtol * want.abs()
        if got.dtype == torch.bfloat16:
            allowed = allowed + ulps * 2**-7 * want.abs()
        excess = ((got.double() - want).abs() - allowed).nan_to_num(torch.inf)
        assert excess.max() <= 0, f"{case}.{result}: off by {float(excess.max()):.3g} more than allowed"


@pytest.fixture(scope="session")
def load_golden(golden):
    """Function from the name of a file to its `Golden`, read once."""
    read = {}

    def load(name):
        if name not in read:
            read[name] = Golden(golden / f"{name}.safetensors")
        return read[name]

    return load

"""Kernels run on a GPU if there is one, else in the interpreter of Triton, chosen before they are imported."""

import importlib.util
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from k3lib.testing import fill_nan


def _loops_in_the_interpreter():
    """Let the interpreter take its scalars as bounds of loops: they are arrays of one element, which numpy refuses."""
    from triton.runtime import interpreter  # noqa: PLC0415 - only where there is one

    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched


def _masks_in_the_interpreter():
    """Newer interpreters widen a mask that is combined with a scalar, and then refuse it."""
    from triton.runtime.interpreter import InterpreterBuilder  # noqa: PLC0415 - only where there is one

    def narrowed(method, place):
        def call(self, *args, **kwargs):
            mask = args[place]
            if mask.data.dtype != bool:
                mask.data = mask.data.astype(bool)
            return method(self, *args, **kwargs)

        return call

    for name, place in (("create_masked_load", 1), ("create_masked_store", 2)):
        setattr(InterpreterBuilder, name, narrowed(getattr(InterpreterBuilder, name), place))


def _patches_in_the_interpreter():
    """Patch the language once a launch: each function that a kernel calls did so again, a third of all the time."""
    from triton.runtime import interpreter  # noqa: PLC0415 - only where there is one

    if not hasattr(interpreter, "_LangPatchScope"):  # another version, which may patch in another way
        return
    patch, done = interpreter._patch_lang, set()

    def once(fn):
        if id(fn.__globals__) in done:
            return interpreter._LangPatchScope()
        scope, is_kernel = patch(fn), not done
        done.add(id(fn.__globals__))
        if is_kernel:
            restore = scope.restore
            scope.restore = lambda: (done.clear(), restore())
        return scope

    interpreter._patch_lang = once


if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_triton_*", "test_sdpa.py"]  # there is no Triton for this platform
elif os.environ.get("TRITON_INTERPRET") == "1":
    _loops_in_the_interpreter()
    _masks_in_the_interpreter()
    _patches_in_the_interpreter()


@pytest.fixture(autouse=True)
def nan_filled_memory():
    with fill_nan():
        yield


@pytest.fixture(scope="session")
def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pytest_collection_modifyitems(items):
    """The interpreter is slow: what runs in two dtypes runs in float32 alone there, unless asked otherwise."""
    if torch.cuda.is_available() or os.environ.get("K3LIB_ALL_KERNEL_TESTS"):
        return
    skip = pytest.mark.skip(reason="float16 in the interpreter; set K3LIB_ALL_KERNEL_TESTS=1")
    folder = os.path.dirname(__file__)
    for item in items:
        if str(item.path).startswith(folder) and "float16" in item.name.replace("bfloat16", ""):
            item.add_marker(skip)

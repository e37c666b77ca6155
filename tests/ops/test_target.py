"""What is here: packages found without importing them, targets made by hand."""

import importlib.metadata
import sys

import pytest
import torch

from k3lib.ops import ASCEND, BLACKWELL, HOPPER, MI35X, Package, Target


def test_target_by_hand_carries_its_packages():
    target = Target.of("cuda", "sm90", flash_mla="1.0", fla="0.6.0")
    assert (target.platform, target.arch) == ("cuda", "sm90")
    assert dict(target.packages) == {"flash_mla": "1.0", "fla": "0.6.0"}


def test_equal_targets_hash_alike():
    assert hash(Target.of("cuda", "sm90", a="1", b="2")) == hash(Target.of("cuda", "sm90", b="2", a="1"))
    assert Target.of("cuda", "sm90", a="1") != Target.of("cuda", "sm90", a="2")


@pytest.mark.parametrize(
    ("target", "text"), [(Target.of("cuda", "sm90"), "cuda/sm90"), (Target.of("cpu"), "cpu"), (Target.cpu(), "cpu")]
)
def test_target_reads_well(target, text):
    assert str(target) == text


def test_detection_agrees_with_torch():
    target = Target.detect()
    assert target is Target.detect()
    if torch.cuda.is_available():
        assert target.platform in ("cuda", "rocm")
    assert target.packages == frozenset()


def test_families_do_not_overlap():
    families = [HOPPER, BLACKWELL, MI35X, ASCEND]
    assert len(frozenset().union(*families)) == sum(map(len, families))


@pytest.mark.parametrize(
    ("package", "reason"),
    [
        (Package("flash_mla"), None),
        (Package("flash_mla", at_least="1.0"), None),
        (Package("flash_mla", at_least="0.9.5"), None),
        (Package("flash_mla", at_least="1.0.2"), "needs flash_mla >= 1.0.2, got 1.0.1+cu13"),
        (Package("flash_mla", at_least="1.1"), "needs flash_mla >= 1.1, got 1.0.1+cu13"),
        (Package("flash_mla", at_least="10.0"), "needs flash_mla >= 10.0, got 1.0.1+cu13"),
        (Package("flash_mla", at_least="1"), None),
        (Package("fla"), "needs the package fla (install fla), which is not here"),
        (Package("fla", dists=("fla-core",)), "needs the package fla (install fla-core), which is not here"),
    ],
)
def test_missing_package_gives_a_reason(package, reason):
    assert package.missing_from(Target.of("cuda", "sm90", flash_mla="1.0.1+cu13")) == reason


@pytest.mark.parametrize(("have", "want"), [("1.0", "1.0.0"), ("2.0.0.post1", "2.0"), ("1.10", "1.9")])
def test_versions_compare_as_numbers(have, want):
    assert Package("x", at_least=want).missing_from(Target.of("cpu", x=have)) is None


@pytest.mark.parametrize("have", ["1.0rc1", "1.0.dev20260101", "1.0"])
def test_a_suffix_is_not_a_later_release(have):
    assert Package("x", at_least="1.0.1").missing_from(Target.of("cpu", x=have)) is not None


def test_installed_package_is_found_with_its_version():
    target = Target.cpu().with_packages((Package("pytest"), Package("no_such_module_here")))
    assert dict(target.packages) == {"pytest": importlib.metadata.version("pytest")}


def test_a_distribution_of_another_name_does_not_count():
    # several names on PyPI are placeholders: the module must come with an accepted distribution
    assert Target.cpu().with_packages((Package("pytest", dists=("no-such-dist",)),)).packages == frozenset()


@pytest.mark.parametrize(("marker", "found"), [("__init__.py", True), ("*.py", True), ("kernels/*.so", False)])
def test_a_marker_must_lie_in_the_package(marker, found):
    target = Target.cpu().with_packages((Package("pytest", marker=marker),))
    assert bool(target.packages) is found


def test_a_package_is_found_without_importing_it(tmp_path, monkeypatch):
    (tmp_path / "vendor_kernels").mkdir()
    (tmp_path / "vendor_kernels" / "__init__.py").write_text("raise RuntimeError('imported')")
    info = tmp_path / "vendor_kernels-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vendor-kernels\nVersion: 1.2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    target = Target.cpu().with_packages((Package("vendor_kernels", dists=("vendor-kernels",)),))
    assert dict(target.packages) == {"vendor_kernels": "1.2"}
    assert "vendor_kernels" not in sys.modules


def test_a_module_without_a_parent_is_not_there():
    assert Target.cpu().with_packages((Package("no_such_parent.child"),)).packages == frozenset()

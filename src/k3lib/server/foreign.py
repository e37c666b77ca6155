"""Flags and environment of another server's published commands: what k3lib does with each.

A flag is taken as it is, stands for a flag of k3lib, changes nothing here, or is refused. None is dropped unsaid.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from k3lib.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Reading", "read_env", "read_option", "translate"]

Verdict = Literal["taken", "as", "needless", "refused"]


class Reading(NamedTuple):
    """What becomes of one flag or variable.

    Attributes:
        name: of the flag without dashes, or of the variable.
        value: its value; True of a switch.
        verdict: "taken" by the same name, "as" other flags, "needless" here, or "refused".
        why: the reason, of "as" what it says here.
        flags: of "as": flags of k3lib and their values; None is the number of ranks of a stage.
    """

    name: str
    value: Any
    verdict: Verdict
    why: str = ""
    flags: Mapping[str, Any] = {}

    def __str__(self) -> str:
        value = "" if self.value is True else f" {self.value}"
        said = {"taken": "taken", "as": self.why, "needless": f"not needed: {self.why}"}
        return f"{self.name}{value}: {said.get(self.verdict, f'k3lib-serve refuses it: {self.why}')}"


# flags of k3lib-serve by the same name and with the same meaning
_TAKEN = frozenset((
    "model-path", "tokenizer-path", "served-model-name", "revision", "host", "port", "api-key", "admin-api-key",
    "reasoning-parser", "tool-call-parser", "tp-size", "pp-size", "dp-size", "ep-size", "dcp-size",
    "shared-experts-tp-size", "dtype", "device", "kv-cache-dtype", "mamba-ssm-dtype", "mamba-radix-cache-strategy",
    "mamba-full-memory-ratio", "max-mamba-cache-size", "max-running-requests", "max-total-tokens",
    "mem-fraction-static", "chunked-prefill-size", "context-length", "disable-radix-cache", "page-size",
    "watchdog-timeout", "dcp-replicate-q-proj", "speculative-algorithm", "speculative-draft-model-path",
    "speculative-dspark-block-size", "speculative-dflash-block-size", "enable-linear-replayssm-spec",
))  # fmt: skip

_KERNELS = "kernels are chosen by machine and shape, see `k3lib explain`"
_SUMS = "ranks exchange through torch.distributed"
_LOADING = "each rank reads its own part of the files"
_GRAPHS = "steps are captured up to the number of running requests"
_CAPACITY = "exchanges take as many rows as come"
_TORCHRUN = "torchrun has it"
_TIER = "the cache has no tier behind the device"
_ROLES = "no server sends its cache to another"

_NEEDLESS = {
    "trust-remote-code": "no code of a checkpoint is run",
    "enable-dp-attention": "--dp-size always means it",
    "enable-dp-lm-head": "every replica computes its own logits",
    "enable-dense-mlp-attn-tp": "dense layers are always cut over the ranks of a replica",
    "max-prefill-tokens": "--chunked-prefill-size bounds all prompt tokens of a step",
    "dist-timeout": "--rank-timeout ends a server whose ranks are gone",
    "enable-symm-mem": _SUMS,
    "disable-custom-all-reduce": _SUMS,
    "disable-flashinfer-autotune": "nothing is tuned at start",
    "weight-loader-prefetch-checkpoints": _LOADING,
    "model-loader-extra-config": _LOADING,
    "attention-backend": _KERNELS,
    "prefill-attention-backend": _KERNELS,
    "decode-attention-backend": _KERNELS,
    "speculative-draft-attention-backend": _KERNELS,
    "moe-runner-backend": _KERNELS,
    "linear-attn-backend": _KERNELS,
    "linear-attn-prefill-backend": _KERNELS,
    "linear-attn-decode-backend": _KERNELS,
    "linear-attn-verify-backend": _KERNELS,
    "cuda-graph-max-bs-decode": _GRAPHS,
    "cuda-graph-bs-decode": _GRAPHS,
    "deepep-mode": _CAPACITY,
}
_REFUSED = {
    "nnodes": f"{_TORCHRUN}: --nnodes",
    "node-rank": f"{_TORCHRUN}: --node-rank",
    "dist-init-addr": f"{_TORCHRUN}: --master-addr and --master-port",
    "disaggregation-mode": _ROLES,
    "disaggregation-transfer-backend": _ROLES,
    "disaggregation-bootstrap-port": _ROLES,
    "disaggregation-decode-extra-slots": _ROLES,
    "disaggregation-decode-enable-radix-cache": _ROLES,
    "enable-hierarchical-cache": _TIER,
    "hicache-storage-backend": _TIER,
    "enable-eplb": "experts do not move while serving; --redundant-experts makes copies at start",
    "enable-w4a4-mxfp4-megamoe": "activations of experts are not cut to four bits",
    "cuda-graph-backend-prefill": "prefill steps are not captured",
}
# the only value that says what is so anyway
_ONLY = {
    "speculative-eagle-topk": (1, "drafts are chains"),
    "speculative-draft-model-quantization": ("unquant", "drafts are stored as published"),
    "mm-feature-transport": ("cpu", "images go to the model through the memory of the host"),
}


def read_option(name: str, value: Any = True) -> Reading:  # noqa: ANN401 - what JSON or a command line holds
    """What becomes of a flag of the other server.

    Args:
        name: without dashes in front.
        value: its value; True of a switch.

    Raises:
        KeyError: neither of k3lib nor known of the other server.
    """
    if name in _TAKEN:
        return Reading(name, value, "taken")
    if name in _NEEDLESS:
        return Reading(name, value, "needless", _NEEDLESS[name])
    if name in _REFUSED:
        return Reading(name, value, "refused", _REFUSED[name])
    if name in _ONLY:
        wanted, why = _ONLY[name]
        same = str(value) == str(wanted)
        return Reading(name, value, "needless" if same else "refused", why if same else f"{why}: only {wanted}")
    return _VALUES[name](name, value)


def _moe_exchange(name: str, value: Any) -> Reading:  # noqa: ANN401 - as above
    if value == "none":
        return Reading(name, value, "needless", "ranks sum what their experts compute")
    flags = {"moe-exchange": "all_to_all", "ep-size": None}
    return Reading(name, value, "as", "as --moe-exchange all_to_all, with --ep-size all ranks of a stage", flags)


def _dcp_exchange(name: str, value: Any) -> Reading:  # noqa: ANN401 - as above
    if value != "fi_a2a":
        return Reading(name, value, "taken")
    return Reading(name, value, "as", "as --dcp-comm-backend a2a, which moves the same", {name: "a2a"})


def _format(name: str, value: Any) -> Reading:  # noqa: ANN401 - as above
    if value in {"modelslim", "w4a8_mxfp4"}:
        return Reading(name, value, "refused", f"weights in {value} cannot be read; MXFP4, NVFP4, FP8 and bf16 can")
    return Reading(name, value, "needless", "the files say how weights are stored")


def _shared_experts(name: str, value: Any) -> Reading:  # noqa: ANN401 - as above
    why = "as --shared-experts-tp-size, all ranks of a replica unless that flag is there"
    return Reading(name, value, "as", why, {"shared-experts-tp-size": None})


_VALUES = {
    "moe-a2a-backend": _moe_exchange,
    "dcp-comm-backend": _dcp_exchange,
    "quantization": _format,
    "enable-shared-experts-attn-tp": _shared_experts,
}


# ---- environment --------------------------------------------------------------------------------

_LIBRARY = "the library it is for reads it"
_LIBRARIES = ("NCCL_", "GLOO_", "HCCL_", "PYTORCH_", "AITER_", "STREAMS_PER_DEVICE")
_VARIABLES = {
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "ranks plan with the least free memory of all",
    "SGLANG_K3_ATTN_RES_MODE": _KERNELS,
    "SGLANG_MOE_FUSED_GATE_RADIX": _KERNELS,
    "SGLANG_USE_AITER": _KERNELS,
    "SGLANG_AITER_K3_OPT": _KERNELS,
    "SGLANG_MLA_DECODE_TUNE": _KERNELS,
    "SGLANG_NPU_USE_FIAS_V2_BSND": _KERNELS,
    "SGLANG_NPU_USE_TRITON_PREFIX_KV_CACHE_STORE": _KERNELS,
    "SGLANG_NPU_FINE_GRAINED_MOE_DUAL_STREAM": _KERNELS,
    "SGLANG_DSPARK_FOLDED_PROPOSAL": _KERNELS,
    "SGLANG_DSPARK_FOLDED_SAMPLING": _KERNELS,
    "SGLANG_DSPARK_STACKED_CTX_KV": _KERNELS,
    "SGLANG_DSPARK_EMBED_IN_GRAPH": _KERNELS,
    "SGLANG_HOST_IP": _TORCHRUN,
    "SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS": "each process takes the device of its LOCAL_RANK",
    "SGLANG_SET_CPU_AFFINITY": "set it for the process, e.g. with taskset",
    "SGLANG_ENABLE_OVERLAP_PLAN_STREAM": "a step is prepared on the host",
    "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK": _CAPACITY,
    "SGLANG_OPT_DEEPGEMM_MEGA_MOE_NUM_MAX_TOKENS_PER_RANK": _CAPACITY,
    "SGLANG_K3_DENSE_MLP_ATTN_TP": _NEEDLESS["enable-dense-mlp-attn-tp"],
}


def read_env(entry: str) -> Reading:
    """What becomes of `NAME=VALUE` in the other server's environment.

    Raises:
        KeyError: not known.
    """
    name, _, value = entry.partition("=")
    if name.startswith(_LIBRARIES):
        return Reading(name, value, "taken", _LIBRARY)
    if name.startswith(("DEEPEP_", "DEEP_")):
        return Reading(name, value, "needless", "DeepEP is not used")
    if name == "SGLANG_K3_SHARED_EXPERTS_ATTN_TP":
        return _shared_experts(name, value)
    if name == "SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK":
        return Reading(name, value, "as", "as --skip-decode-lock of `k3lib plan`", {"skip-decode-lock": True})
    if name == "SGLANG_RAGGED_VERIFY_MODE":
        if value == "static":
            return Reading(name, value, "needless", "whole drafts are verified without --speculative-adaptive")
        return Reading(name, value, "as", "as --speculative-adaptive", {"speculative-adaptive": True})
    if name == "SGLANG_USE_MODELSCOPE":
        return Reading(name, value, "refused", "weights come from a folder or the Hugging Face hub")
    if name == "SGLANG_HICACHE_MOONCAKE_CONFIG_PATH":
        return Reading(name, value, "refused", _TIER)
    return Reading(name, value, "needless", _VARIABLES[name])


# ---- command lines ------------------------------------------------------------------------------


def translate(arguments: Sequence[str]) -> tuple[list[str], list[Reading]]:
    """A command line of `k3lib-serve` from one that may hold flags of the other server.

    Args:
        arguments: as given, without the name of the program.

    Returns:
        The command line, and what became of the flags that k3lib does not have or reads otherwise.

    Raises:
        ConfigError: a flag that cannot be followed; names all such flags, each with the reason.
    """
    kept: list[str] = []
    found: list[Reading] = []
    foreign = _NEEDLESS.keys() | _REFUSED.keys() | _ONLY.keys() | _VALUES.keys() - {"mem-fraction-static"}
    for name, words in _flags(arguments):
        key = (name or "").replace("_", "-")
        if key not in foreign:
            kept += words
            continue
        values = [words[0].partition("=")[2]] if "=" in words[0] else words[1:]
        reading = read_option(key, " ".join(values) if values else True)
        if reading.verdict == "taken":
            kept += words
        else:
            found.append(reading)
    refused = [f"--{reading.name} {reading.why}" for reading in found if reading.verdict == "refused"]
    if refused:
        raise ConfigError(f"k3lib-serve cannot follow {'; '.join(refused)}")
    given = dict(_flags(kept))
    for reading in found:
        for flag, value in reading.flags.items():
            if flag not in given:
                kept += [f"--{flag}", value if value is not None else _ranks(given, flag)]
    return kept, found


def _flags(arguments: Sequence[str]) -> list[tuple[str | None, list[str]]]:
    """The words of each flag; words in front of the first have the name None."""
    parts: list[tuple[str | None, list[str]]] = []
    for word in arguments:
        if word.startswith("--"):
            parts.append((word[2:].partition("=")[0], [word]))
        elif parts:
            parts[-1][1].append(word)
        else:
            parts.append((None, [word]))
    return parts


def _ranks(given: Mapping[str | None, list[str]], flag: str) -> str:
    """Ranks of a stage for the experts, those of a replica for shared ones."""

    def size(name: str) -> int:
        words = given.get(name, [f"--{name}=1"])
        text = words[0].partition("=")[2] or (words[1] if len(words) > 1 else "")
        if not text.isdigit() or int(text) < 1:
            raise ConfigError(f"--{name} must be an integer >= 1, got {text!r}")
        return int(text)

    return str(size("tp-size") if flag == "ep-size" else max(1, size("tp-size") // size("dp-size")))

"""The commands `k3lib` and `k3lib-serve`. Flags, defaults and help come from the dataclasses below."""

from __future__ import annotations

import gc
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from k3lib.errors import ConfigError, K3Error

if TYPE_CHECKING:
    import torch

    from k3lib.model import KimiK3ForCausalLM
    from k3lib.server.tokenizer import Tokenizer

__all__ = ["main", "serve"]

DType = Literal["auto", "float32", "bfloat16"]
BUILT_IN = "tiny"  # the served name of the built-in model


@dataclass(frozen=True, kw_only=True)
class MakeTiny:
    """Write a seeded tiny checkpoint in the released naming and packing; byte-identical for equal arguments."""

    out: tyro.conf.Positional[Path]
    """Folder, made if needed."""
    seed: int = 0
    """Of the random weights."""
    mxfp4: bool = True
    """Pack the routed experts as in the official release."""
    vision: bool = True
    """Add the vision tower and projector."""

    def run(self) -> int:
        from k3lib.server.tiny import make_tiny

        make_tiny(self.out, seed=self.seed, mxfp4=self.mxfp4, vision=self.vision)
        size = sum(file.stat().st_size for file in self.out.iterdir())
        print(f"{self.out}: {size / 1e6:.1f} MB")
        return 0


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Run one prompt through the engine and print what follows it."""

    model_path: str | None = None
    """Folder or hub name; the built-in tiny model if left out."""
    prompt: str | None = None
    """Text; needs a tokenizer."""
    ids: tuple[int, ...] = ()
    """Token ids in place of a text."""
    max_new_tokens: int = 64
    """Most tokens to generate."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Keep the smallest set of tokens that reaches this probability."""
    top_k: int = 0
    """Keep this many tokens; 0 keeps all."""
    seed: int | None = None
    """Makes the output repeatable."""
    ignore_eos: bool = False
    """Go on after the end of the message."""
    tokenizer_path: str | None = None
    """Folder with tiktoken.model, or "bytes"; default: the model folder."""
    device: str | None = None
    """Default: the accelerator if there is one."""
    dtype: DType = "auto"
    """auto: as stored; float32 on a CPU for the built-in model."""
    layers: int | None = None
    """Run only the first so many layers."""

    def run(self) -> int:
        from k3lib.engine import Engine, SamplingParams
        from k3lib.server.tokenizer import IncrementalDecoder

        if (self.prompt is None) == (not self.ids):
            raise ConfigError("generate: give either --prompt TEXT or --ids N N …")
        params = SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_new_tokens=self.max_new_tokens,
            seed=self.seed,
            ignore_eos=self.ignore_eos,
        )
        model = _load(self.model_path, dtype=self.dtype, device=self.device, layers=self.layers)
        engine = Engine(model)
        if self.prompt is None:
            print(*engine.stream(list(self.ids), params))
            return 0
        tok = _tokenizer(self.model_path, self.tokenizer_path, model)
        decoder = IncrementalDecoder(tok)
        for token in engine.stream(tok.encode(self.prompt, allow_special=True), params):
            print(decoder.push([token]), end="", flush=True)
        print(decoder.finish())
        return 0


@dataclass(frozen=True, kw_only=True)
class Explain:
    """Say which kernel each op would use for a model, and why not the others."""

    model_path: str | None = None
    """Folder or hub name (only config.json is read); the built-in tiny model if left out."""
    arch: str | None = None
    """sm90, sm100, sm103, gfx950, a3, 950 or cpu; default: this machine."""
    tp_size: int = 1
    """Ranks that share the heads."""
    dtype: DType = "auto"
    """Of the activations; auto: float32 on a CPU, else bfloat16."""

    def run(self) -> int:
        import torch

        from k3lib.checkpoint import Folder
        from k3lib.config import KimiK3Config
        from k3lib.server.reports import explain_model

        config = (
            KimiK3Config.tiny() if self.model_path is None else KimiK3Config.from_hf(Folder(self.model_path).config())
        )
        dtype = None if self.dtype == "auto" else getattr(torch, self.dtype)
        print(explain_model(config, arch=self.arch, tp_size=self.tp_size, dtype=dtype))
        return 0


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """Describe a checkpoint from its headers, and say what is wrong with it. Exit status 1 if it would not load."""

    path: tyro.conf.Positional[str]
    """Folder or hub name."""

    def run(self) -> int:
        from k3lib.server.reports import inspect_checkpoint

        report, problems = inspect_checkpoint(self.path)
        print(report)
        if not problems:
            print("nothing is wrong with it")
            return 0
        print(f"{len(problems)} problems")
        for problem in problems[:20]:
            print(f"  {problem}")
        if len(problems) > 20:
            print(f"  … and {len(problems) - 20} more")
        return 1


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Say what is installed, which kernels would run, and what would fail and why."""

    def run(self) -> int:
        from k3lib.server.reports import doctor

        print(doctor())
        return 0


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Serve a model over HTTP with OpenAI's API. Without a model: the built-in tiny one, on the CPU."""

    model_path: str | None = None
    """Folder or hub name; the built-in tiny model if left out."""
    tokenizer_path: str | None = None
    """Folder with tiktoken.model, or "bytes"; default: the model folder."""
    served_model_name: str | None = None
    """Name in the API; default: the model path."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 30000
    """Port to listen on."""
    dtype: DType = "auto"
    """auto: as stored; float32 on a CPU for the built-in model."""
    device: str | None = None
    """Default: the accelerator if there is one."""
    context_length: int | None = None
    """Longest prompt plus output; default: the model's positions."""
    chunked_prefill_size: int = 2048
    """Most prompt tokens of one prefill step."""
    max_running_requests: int | None = None
    """Requests in flight; default 16, fewer if memory is short."""
    strict_backends: bool = False
    """Refuse the slow reference on an accelerator."""

    def run(self) -> int:
        import uvicorn

        from k3lib.engine import AsyncEngine, Engine, EngineConfig
        from k3lib.engine.engine import decisions
        from k3lib.server.app import create_app

        config = EngineConfig(
            context_length=self.context_length,
            chunked_prefill_size=self.chunked_prefill_size,
            max_running_requests=self.max_running_requests,
            strict_backends=self.strict_backends,
        )
        model = _load(self.model_path, dtype=self.dtype, device=self.device)
        tok = _tokenizer(self.model_path, self.tokenizer_path, model)
        engine = Engine(model, config)
        logging.getLogger(__name__).info("kernels\n%s", decisions(model))
        name = self.served_model_name or self.model_path or BUILT_IN
        gc.collect()
        gc.freeze()  # the model lives as long as the process; do not walk it again and again
        runner = AsyncEngine(engine)
        app = create_app(runner, tok, model_name=name, max_model_len=engine.context_length)
        print(f"serving {name} on http://{self.host}:{self.port}", flush=True)
        try:
            uvicorn.run(app, host=self.host, port=self.port, log_level="warning")
        finally:
            runner.close()
        return 0


def _device(asked: str | None, *, built_in: bool) -> str:
    from k3lib.ops.target import Target

    if asked is not None:
        return asked
    platform = "cpu" if built_in else Target.detect().platform
    return "cuda" if platform == "rocm" else platform


def _load(path: str | None, *, dtype: DType, device: str | None, layers: int | None = None) -> KimiK3ForCausalLM:
    import torch

    from k3lib.model import KimiK3ForCausalLM

    where = _device(device, built_in=path is None)
    wanted: torch.dtype | None = None if dtype == "auto" else getattr(torch, dtype)
    if path is not None:
        some = None if layers is None else range(layers)
        return KimiK3ForCausalLM.from_pretrained(path, dtype=wanted, device=where, layers=some)
    if layers is not None:
        raise ConfigError("--layers needs --model-path")
    from k3lib.server.tiny import tiny_model

    return tiny_model(dtype=wanted or (torch.float32 if where == "cpu" else torch.bfloat16)).to(where)


def _tokenizer(model_path: str | None, asked: str | None, model: KimiK3ForCausalLM) -> Tokenizer:
    from k3lib.checkpoint import Folder
    from k3lib.server.tokenizer import load_tokenizer

    if asked is not None or model_path is None:
        return load_tokenizer(asked)
    ranks = Folder(model_path).file("tiktoken.model")
    if ranks.exists():
        return load_tokenizer(ranks.parent)
    bytes_tokenizer = load_tokenizer()
    if model.config.text.vocab_size == bytes_tokenizer.vocab_size:
        return bytes_tokenizer
    raise ConfigError(
        f"{model_path} has no tiktoken.model and a vocabulary of {model.config.text.vocab_size}; give --tokenizer-path"
    )


Command = (
    Annotated[MakeTiny, tyro.conf.subcommand("make-tiny")]
    | Annotated[Generate, tyro.conf.subcommand("generate")]
    | Annotated[Explain, tyro.conf.subcommand("explain")]
    | Annotated[Inspect, tyro.conf.subcommand("inspect")]
    | Annotated[Doctor, tyro.conf.subcommand("doctor")]
)


def _run(command: MakeTiny | Generate | Explain | Inspect | Doctor | Serve) -> int:
    level = os.environ.get("K3LIB_LOG", "info" if isinstance(command, Serve) else "warning")
    logging.basicConfig(level=level.upper(), format="%(levelname)s %(name)s: %(message)s")
    try:
        status = command.run()
        sys.stdout.flush()
    except K3Error as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever reads the output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ImportError as error:
        print(f"error: {error.name} is not installed (pip install k3lib[server])", file=sys.stderr)
        return 2
    return status


def main() -> None:
    """Run `k3lib`."""
    sys.exit(_run(tyro.cli(Command, prog="k3lib", description="Kimi-K3 in modular PyTorch.")))


def serve() -> None:
    """Run `k3lib-serve`."""
    sys.exit(_run(tyro.cli(Serve, prog="k3lib-serve")))

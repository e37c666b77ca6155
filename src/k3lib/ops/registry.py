"""Ops and their implementations: choosing a kernel is a pure function of static facts, and explains itself.

An op is made by `@op(...)` on its readable reference. Kernels are registered against it. `resolve` looks at the spec
(shapes, dtypes, modes; never tensor values) and at the target (chip, packages), so a choice for any chip can be asked
and tested anywhere.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import importlib
import inspect
import logging
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, TypeVar

import torch

from k3lib.errors import BackendUnavailable, ConfigError, SlowPathWarning
from k3lib.ops.target import PLATFORMS, Package, Target, default_family

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

__all__ = [
    "REFERENCE",
    "Decision",
    "Impl",
    "Op",
    "Spec",
    "explain",
    "implementations",
    "intern_spec",
    "observe",
    "op",
    "ops",
    "options_key",
    "register",
    "use_backend",
    "use_options",
]

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound="Callable[..., Any]")

REFERENCE = "reference"
COMPOSED = "composed"


class Spec(Protocol):
    """Static facts of one call: a frozen dataclass, hashable, without token counts."""

    def __hash__(self) -> int: ...

    @property
    def deterministic(self) -> bool:
        """Whether only implementations that are `deterministic` (see `Impl`) may run."""
        ...


S = TypeVar("S")


def intern_spec(cls: Callable[..., S], *facts: object) -> S:
    """Return the spec of `cls` with these field values in their order; the same object for the same facts.

    Building a frozen dataclass costs more than looking one up, and an op builds one at every call.
    """
    if torch.compiler.is_dynamo_compiling():  # which would trace past the cache, and warn
        return _make_spec(cls, *facts)
    spec: S = _interned_spec(cls, *facts)
    return spec


def _make_spec(cls: Callable[..., S], *facts: object) -> S:
    return cls(**dict(zip(cls.__slots__, facts, strict=False)))  # type: ignore[attr-defined]


_interned_spec = functools.lru_cache(maxsize=4096)(_make_spec)


def _supports_all(_spec: Any) -> str | None:  # noqa: ANN401 - any spec
    return None


def _supports_plain_steps(spec: Any) -> str | None:  # noqa: ANN401 - any spec
    """What a kernel supports that says nothing: it may never have heard of verify steps, whose states must stay."""
    verify = getattr(spec, "verify", "none")
    return None if verify == "none" else f"needs verify=none, got verify={verify} (it has no supports=...)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Impl:
    """One implementation of an op.

    Attributes:
        op: name of the op.
        name: unique within the op.
        run: same signature as the op.
        platforms: subset of {"cuda", "rocm", "npu", "cpu"}.
        archs: chips it runs on; None = any of the platform.
        requires: packages it needs.
        priority: higher first among the able; equal priorities by name.
        experimental: never run on its hardware by us; chosen by itself only over the reference, with a warning.
        proven_on: chips that it has been run on by us; on all others it is experimental. None = all of them.
        deterministic: bitwise repeatable, and nothing inside is chosen by the rest of the batch. (Matrix products of
            torch may still round differently for another number of rows.)
        supports: None = yes, else the reason, one sentence of the form "needs A, got B".
        prepare: canonical weights -> private layout, once while loading.
        plan: (spec, batch, previous) -> scheduling data, once per step.
    """

    op: str
    name: str
    run: Callable[..., Any]
    platforms: frozenset[str]
    archs: frozenset[str] | None = None
    requires: tuple[Package, ...] = ()
    priority: int = 0
    experimental: bool = False
    proven_on: frozenset[str] | None = None
    deterministic: bool = False
    supports: Callable[[Any], str | None] = _supports_all
    prepare: Callable[..., Any] | None = None
    plan: Callable[..., Any] | None = None

    def __str__(self) -> str:
        return self.name

    def is_experimental(self, target: Target) -> bool:
        """Whether it has never been run on this chip by us."""
        return self.experimental or (self.proven_on is not None and target.arch not in self.proven_on)

    def why_not(self, spec: Spec | None, target: Target) -> str | None:
        """Return None if this implementation can serve `spec` on `target`, else the reason."""
        if target.platform not in self.platforms:
            return f"needs platform {' or '.join(sorted(self.platforms))}, this is {target.platform}"
        if self.archs is not None and target.arch not in self.archs:
            return f"needs {' or '.join(sorted(self.archs))}, this is {target.arch}"
        for package in self.requires:
            if reason := package.missing_from(target):
                return reason
        if spec is None:
            return None
        if spec.deterministic and not self.deterministic:
            return "needs deterministic=False: it is not bitwise repeatable, or takes other paths in other batches"
        return self.supports(spec)


@dataclass(frozen=True, slots=True)
class Decision:
    """Which implementation would run, and why not the others. `str()` gives a small table."""

    op: str
    target: Target
    chosen: Impl | None
    able: tuple[Impl, ...]
    rejected: tuple[tuple[str, str], ...]
    forced_by: str | None = None

    def __str__(self) -> str:
        lines = [f"{self.op} on {self.target}"]
        rows = []
        if self.chosen is not None:
            why = f"forced by {self.forced_by}" if self.forced_by else _rank(self.chosen, self.target)
            rows.append(("chosen", self.chosen.name, why))
        rows += [("able", impl.name, _rank(impl, self.target)) for impl in self.able if impl is not self.chosen]
        rows += [("rejected", name, reason) for name, reason in self.rejected]
        width = max((len(name) for _, name, _ in rows), default=0)
        lines += [f"  {kind:<9} {name:<{width}}  {why}" for kind, name, why in rows]
        return "\n".join(lines)


def _rank(impl: Impl, target: Target) -> str:
    if impl.name == REFERENCE:
        return "the readable reference"
    if impl.name == COMPOSED:
        return "in terms of narrower ops"
    return f"priority {impl.priority}" + (", experimental" if impl.is_experimental(target) else "")


@dataclass(frozen=True, slots=True, eq=False)
class _Options:
    """What `use_backend` and `use_options` set. Interned: equal options are one object, compared by identity."""

    family: str | None = None
    per_op: tuple[tuple[str, str], ...] = ()
    forced_by: str = "use_backend"
    strict: bool = False
    deterministic: bool = False


_options: contextvars.ContextVar[_Options] = contextvars.ContextVar("k3lib_options")
_observers: contextvars.ContextVar[tuple[Callable[[str, Any, str], None], ...]] = contextvars.ContextVar(
    "k3lib_observers", default=()
)
_registry: dict[str, Op[Any, Any]] = {}


@functools.lru_cache(maxsize=1024)
def _make_options(
    family: str | None, per_op: tuple[tuple[str, str], ...], forced_by: str, strict: bool, deterministic: bool
) -> _Options:
    return _Options(family, per_op, forced_by, strict, deterministic)


def _changed(**changes: Any) -> _Options:  # noqa: ANN401 - fields of _Options
    now = _current()
    fields = {name: changes.get(name, getattr(now, name)) for name in _Options.__slots__}
    return _make_options(**fields)


def _current() -> _Options:
    return _options.get(None) or _from_environment()


@functools.cache
def _from_environment() -> _Options:
    family = default_family()
    check_backends(family, {})  # a misspelt variable is refused like a misspelt argument
    return _make_options(family, (), "K3LIB_BACKEND", strict=False, deterministic=False)


class Op(Generic[P, R]):
    """A typed function whose body is the readable torch implementation; kernels are registered against it."""

    MEMO = 4096  # choices remembered by the identity of their spec

    def __init__(
        self, reference: Callable[P, R], spec_of: Callable[..., Spec], default: str, parts: tuple[str, ...]
    ) -> None:
        self.name = reference.__name__
        self.reference = reference
        self.spec_of = spec_of
        self.default = default
        self.parts = parts
        self.broken: dict[tuple[str, Spec], str] = {}  # kernels that did not compile for a spec, with why
        # key with the identity of the spec, which the value keeps alive
        self._memo: dict[tuple[int, str, _Options], tuple[Spec, str, Callable[..., Any]]] = {}
        self._impls: dict[str, Impl] = {}
        self._warned: set[str] = set()
        functools.update_wrapper(self, reference)

    def __repr__(self) -> str:
        return f"<op {self.name}>"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Choose by static facts, then run."""
        spec = self.spec_of(*args, **kwargs)
        if torch.compiler.is_dynamo_compiling():
            spec_type: type[Any] = type(spec)
            facts = tuple(getattr(spec, name) for name in spec_type.__slots__)
            name = _choose_while_compiling(self.name, spec_type, facts, _device_type((*args, *kwargs.values())))
            traced: R = self._impls[name].run(*args, **kwargs)
            return traced
        first: Any = args[0] if args else None
        if first is None:
            kind = _device_type((*args, *kwargs.values()))
        else:  # a small model on a CPU spends its time on calls, and this one is the quicker
            kind = "cpu" if first.is_cpu else first.device.type
        key = (id(spec), kind, _options.get(None) or _from_environment())
        known = self._memo.get(key) or self._remember(spec, key)
        if observers := _observers.get():
            for callback in observers:
                callback(self.name, spec, known[1])
        try:
            result: R = known[2](*args, **kwargs)
        except Exception as error:
            if (reason := _compiler_error(error)) is None or known[1] == self.default or self._is_forced(known[1]):
                raise
            self._give_up(known[1], spec, reason)
            return self(*args, **kwargs)
        return result

    def _is_forced(self, name: str) -> bool:
        return dict(_current().per_op).get(self.name) == name

    def _give_up(self, name: str, spec: Spec, reason: str) -> None:
        """Do not choose a kernel again for calls like one at which it could not be compiled."""
        self.broken[name, spec] = f"could not be compiled here: {reason}"
        _forget_choices()
        _warn_once(self, f"{self.name}/{name} could not be compiled and is not used: {reason}")

    def _remember(self, spec: Spec, key: tuple[int, str, _Options]) -> tuple[Spec, str, Callable[..., Any]]:
        name = _cached_choice(self.name, spec, key[1], key[2])
        if len(self._memo) >= self.MEMO:
            self._memo.clear()
        self._memo[key] = known = (spec, name, self._impls[name].run)
        return known

    def implementations(self) -> tuple[Impl, ...]:
        """All registered implementations, best first; the reference last."""
        return self.ordered(None)

    def ordered(self, target: Target | None) -> tuple[Impl, ...]:
        """The same in the order in which this chip would choose."""
        _load_backends()
        return tuple(sorted(self._impls.values(), key=lambda impl: _order(impl, self.default, target)))

    def resolve(self, spec: Spec | None, *, target: Target | None = None) -> Impl:
        """Return the implementation that would run.

        Raises:
            BackendUnavailable: a forced implementation is not able; the message is the whole decision.
        """
        return _resolve(self, spec, target or self.local_target(), _current())

    def local_target(self, device_type: str | None = None) -> Target:
        """This machine's accelerator (or its CPU for tensors on the CPU), with the packages this op can use."""
        target = Target.cpu() if device_type == "cpu" else Target.detect()
        return target.with_packages(tuple(p for impl in self.implementations() for p in impl.requires))

    def add(self, impl: Impl) -> None:
        """Register an implementation.

        Raises:
            ConfigError: the name is taken, or the function's parameters differ from the op's.
        """
        if impl.name in self._impls:
            raise ConfigError(f"{self.name} has an implementation named {impl.name!r} already")
        if unknown := sorted(impl.platforms - set(PLATFORMS)):
            raise ConfigError(f"{self.name}/{impl.name}: unknown platforms {unknown}; known are {list(PLATFORMS)}")
        want, got = _parameters(self.reference), _parameters(impl.run)
        if got != want:
            raise ConfigError(f"{self.name}/{impl.name}: its parameters are {got}; the op has {want}")
        self._impls[impl.name] = impl
        _forget_choices()

    def remove(self, name: str) -> None:
        """Take an implementation away again (for tests and notebooks)."""
        if name == self.default:
            raise ConfigError(f"{self.name}: the {name} implementation cannot be removed")
        if self._impls.pop(name, None) is None:
            raise ConfigError(f"{self.name} has no implementation named {name!r}")
        self.broken = {key: reason for key, reason in self.broken.items() if key[0] != name}
        _forget_choices()


def _compiler_error(error: Exception) -> str | None:
    """First sentence of an error of a kernel compiler, or None for any other error."""
    kinds = {(kind.__module__.split(".")[0], kind.__name__) for kind in type(error).__mro__}
    if not any(module == "triton" or name in ("CompilationError", "OutOfResources") for module, name in kinds):
        return None
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # Triton quotes its source first and says what is wrong last
    return (lines[-1] if lines and lines[0].startswith("at ") else lines[0] if lines else type(error).__name__)[:200]


def _parameters(function: Callable[..., Any]) -> list[str]:
    """Positional names in order, then the keyword-only names sorted."""
    parameters = inspect.signature(function).parameters.values()
    keywords = sorted(p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY] + ["*", *keywords]


def op(
    spec_of: Callable[..., Spec],
    *,
    default: str = REFERENCE,
    supports: Callable[[Any], str | None] = _supports_all,
    parts: tuple[str, ...] = (),
) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Turn a readable torch function into an op.

    Args:
        spec_of: takes the arguments of the op, returns its spec.
        default: name of the decorated implementation: "reference", or "composed" if it calls narrower ops.
        supports: what the decorated implementation declines, as in `Impl`.
        parts: names of the narrower ops that a "composed" implementation calls. Forcing one of them keeps fused
            kernels of the wide op from running past it.
    """

    def make(reference: Callable[P, R]) -> Op[P, R]:
        made = Op(reference, spec_of, default, parts)
        made._impls[default] = Impl(
            op=made.name,
            name=default,
            run=reference,
            platforms=frozenset(PLATFORMS),
            priority=-1000,
            deterministic=True,
            supports=supports,
        )
        _registry[made.name] = made
        return made

    return make


def ops() -> Mapping[str, Op[Any, Any]]:
    """All ops by name."""
    return dict(_registry)


def implementations(of: Op[Any, Any]) -> tuple[Impl, ...]:
    """All registered implementations of an op, best first: to parametrise tests."""
    return of.implementations()


def register(
    op: Op[Any, Any],
    *,
    name: str,
    platforms: set[str] | frozenset[str],
    archs: set[str] | frozenset[str] | None = None,
    requires: tuple[Package, ...] = (),
    priority: int = 0,
    experimental: bool = False,
    proven_on: set[str] | frozenset[str] | None = None,
    deterministic: bool = False,
    supports: Callable[[Any], str | None] = _supports_plain_steps,
    prepare: Callable[..., Any] | None = None,
    plan: Callable[..., Any] | None = None,
) -> Callable[[F], F]:
    """Register the decorated function as an implementation of `op`; returns it unchanged.

    Arguments are the fields of `Impl`. The function must have exactly the parameters of the op. Without `supports` it
    takes everything but verify steps, which leave the state where it is.
    """

    def add(run: F) -> F:
        op.add(
            Impl(
                op=op.name,
                name=name,
                run=run,
                platforms=frozenset(platforms),
                archs=None if archs is None else frozenset(archs),
                requires=requires,
                priority=priority,
                experimental=experimental,
                proven_on=None if proven_on is None else frozenset(proven_on),
                deterministic=deterministic,
                supports=supports,
                prepare=prepare,
                plan=plan,
            )
        )
        return run

    return add


@contextlib.contextmanager
def use_backend(name: str | None = None, /, **per_op: str) -> Iterator[None]:
    """Prefer a family of kernels, or force single ops.

    `use_backend("flashinfer")` is a preference: each op in which that name is registered and able uses it, others
    choose as usual. `use_backend(kda_recurrent="triton")` is strict: a call raises `BackendUnavailable` if it cannot.
    Acts when an op chooses: a captured graph keeps the choice of its capture, prepared weights that of their
    preparation.

    Raises:
        ConfigError: an unknown op.
        BackendUnavailable: an implementation name that the op does not have, or a family that no op has.
    """
    check_backends(name, per_op)
    now = _current()
    merged = {**dict(now.per_op), **per_op}
    token = _options.set(
        _changed(family=name or now.family, per_op=tuple(sorted(merged.items())), forced_by="use_backend")
    )
    try:
        yield
    finally:
        _options.reset(token)


def check_backends(name: str | None, per_op: Mapping[str, str]) -> None:
    """Refuse names of ops and implementations that do not exist, before anything is built with them."""
    for op_name, impl_name in per_op.items():
        if op_name not in _registry:
            raise ConfigError(f"there is no op named {op_name!r}; ops are {', '.join(sorted(_registry))}")
        known = [impl.name for impl in _registry[op_name].implementations()]
        if impl_name not in known:
            raise BackendUnavailable(
                f"{op_name} has no implementation named {impl_name!r}; registered are {', '.join(known)}"
            )
    if name is not None and name not in (known_names := _all_names()):
        raise BackendUnavailable(
            f"no op has an implementation named {name!r}; registered are {', '.join(sorted(known_names))}"
        )


def _all_names() -> set[str]:
    return {impl.name for each in _registry.values() for impl in each.implementations()}


@contextlib.contextmanager
def use_options(*, strict: bool | None = None, deterministic: bool | None = None) -> Iterator[None]:
    """Refuse the reference on an accelerator (`strict`), or admit only `deterministic` kernels."""
    given = {"strict": strict, "deterministic": deterministic}
    token = _options.set(_changed(**{name: value for name, value in given.items() if value is not None}))
    try:
        yield
    finally:
        _options.reset(token)


def options_key() -> object:
    """What `use_backend` and `use_options` ask for here: the same object as long as it is the same."""
    return _current()


@contextlib.contextmanager
def observe(callback: Callable[[str, Any, str], None]) -> Iterator[None]:
    """Call `callback(op name, spec, implementation name)` at every call of an op."""
    token = _observers.set((*_observers.get(), callback))
    try:
        yield
    finally:
        _observers.reset(token)


def explain(op: Op[Any, Any], spec: Spec | None = None, *, target: Target | None = None) -> Decision:
    """Say which implementation of `op` would run, and why not each other one.

    Args:
        op: the op.
        spec: static facts of the call; None asks only about chip and packages.
        target: default is this machine.
    """
    return _decide(op, spec, target or op.local_target(), _current())


def _order(impl: Impl, default: str, target: Target | None) -> tuple[bool, bool, int, str]:
    # an experimental kernel stands below every proven one and above the reference
    is_experimental = impl.experimental if target is None else impl.is_experimental(target)
    return (impl.name == default, is_experimental, -impl.priority, impl.name)


def _decide(op: Op[Any, Any], spec: Spec | None, target: Target, options: _Options) -> Decision:
    if spec is not None and options.deterministic and not spec.deterministic:
        spec = dataclasses.replace(spec, deterministic=True)  # type: ignore[type-var]
    reasons = {impl: impl.why_not(spec, target) for impl in op.ordered(target)}
    if spec is not None and op.broken and target.platform == op.local_target().platform:
        reasons = {impl: reason or op.broken.get((impl.name, spec)) for impl, reason in reasons.items()}
    asked = dict(options.per_op)
    if op.name not in asked and (inside := [part for part in op.parts if part in asked]):
        for impl in reasons:
            if impl.name != op.default:
                reasons[impl] = reasons[impl] or f"needs {inside[0]} not to be forced: it would not call it"
    able = tuple(impl for impl, reason in reasons.items() if reason is None)
    rejected = tuple((impl.name, reason) for impl, reason in reasons.items() if reason is not None)
    forced = asked.get(op.name)
    wanted = forced or options.family
    if wanted == REFERENCE:
        wanted = op.default  # of a wide op: the one in terms of narrower ops
    chosen = next((impl for impl in able if impl.name == wanted), None)
    if chosen is not None:
        return Decision(op.name, target, chosen, able, rejected, options.forced_by)
    if forced is None and able:
        return Decision(op.name, target, able[0], able, rejected)
    return Decision(op.name, target, None, able, rejected, options.forced_by if forced else None)


def _resolve(op: Op[Any, Any], spec: Spec | None, target: Target, options: _Options) -> Impl:
    decision = _decide(op, spec, target, options)
    if decision.chosen is None:
        asked = dict(options.per_op).get(op.name)
        what = f"{op.name}: {asked!r} was forced and cannot run" if asked else f"{op.name}: nothing can run"
        raise BackendUnavailable(f"{what}\n{decision}", decision)
    chosen = decision.chosen
    if decision.forced_by is not None:
        return chosen  # asked for: no surprise to warn of
    if target.platform != "cpu" and chosen.name == REFERENCE:
        if options.strict:
            raise BackendUnavailable(f"{op.name}: only the reference is able, and strict is set\n{decision}", decision)
        _warn_once(op, f"{op.name} runs its slow reference on {target}: no kernel is able\n{decision}")
    elif chosen.is_experimental(target):
        _warn_once(op, f"{op.name} runs the experimental {chosen.name} on {target}\n{decision}")
    return chosen


def _warn_once(op: Op[Any, Any], message: str) -> None:
    if message not in op._warned:
        op._warned.add(message)
        warnings.warn(message, SlowPathWarning, stacklevel=4)


@functools.lru_cache(maxsize=4096)
def _cached_choice(op_name: str, spec: Spec, device_type: str, options: _Options) -> str:
    op = _registry[op_name]
    return _resolve(op, spec, op.local_target(device_type), options).name


def _choose_while_compiling(op_name: str, spec_type: type[Any], facts: tuple[object, ...], device_type: str) -> str:
    """The choice as a constant of the graph, so that neither context variables nor caches are traced.

    The spec comes in parts: torch.compile passes a dataclass made inside the traced code as an empty shell.
    """
    spec = spec_type(**dict(zip(spec_type.__slots__, facts, strict=True)))
    return _cached_choice(op_name, spec, device_type, _current())


# what torch.compiler.assume_constant_result sets; calling it would import the compiler, which costs two seconds
_choose_while_compiling._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _forget_choices() -> None:
    _cached_choice.cache_clear()
    for each in _registry.values():
        each._memo.clear()


def _device_type(args: tuple[Any, ...]) -> str:
    for value in args:
        if isinstance(value, torch.Tensor):
            tensor: Tensor = value
            return tensor.device.type
    return "cpu"


@functools.cache
def _load_backends() -> None:
    # by name: ops must not depend on backends, which import ops
    importlib.import_module("k3lib.backends").load_all()

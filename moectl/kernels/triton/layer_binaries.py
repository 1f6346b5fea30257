"""Which binaries the kernels of a layer are, for any number of tokens, found without compiling them.

The ordinary host code runs on tensors of the device ``meta``, and Triton's own code computes the key of every
launch; what would compile the launch is recorded instead (`recording`).
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from inspect import signature
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.compiler import make_backend
from triton.runtime.cache import _base32, get_cache_key, triton_key
from triton.runtime.jit import JITFunction

from ...dtypes import MODEL_DTYPES
from ...errors import UsageError
from ...torch_dtypes import TORCH_DTYPES
from ..choice.launch_plan import MOST_TOKENS as MOST_TOKENS
from ..prepared_layer import PreparedMoE
from ..runner import ActivationFormat, Runner
from .expert_batches import CHOSEN_FOR, layer_one_each
from .hopper.gemm_spec import exact_weights
from .hopper.stream import EXACT_SCALES
from .kernel_family import LAYER, KernelLayer, layer_of
from .triton_runner import RUNNER

OWN = ("moectl", "moectl_marlin")
"""Backends whose kernels are moectl's own; the others' are compiled by their libraries."""

FORMS = (ActivationFormat.STANDARD,)
"""Activation formats whose binaries are compiled by default."""


def compiler() -> dict[str, str]:
    """What every key in Triton's cache depends on beside Triton's version: Python's, and Triton's build.

    The build is a hash of Triton's own code and library, which is compiled for one minor version of Python.
    """
    build = hashlib.sha256(triton_key().encode()).hexdigest()[:12]
    return {"python": ".".join(map(str, sys.version_info[:2])), "triton build": build}


@dataclass(frozen=True)
class Binary:
    """A compiled form of a kernel.

    Attributes:
        name: the kernel's function.
        key: name of its directory in Triton's cache, a hash of source, constants, options, GPU and Triton.
        form, tokens: activation format of calls that launch it, and the fewest tokens of one.
        compile: compiles it, or takes it from Triton's cache, and keeps it for launches of this process;
            returns Triton's kernel.
    """

    name: str
    key: str
    form: ActivationFormat
    tokens: int
    compile: Callable[[], Any] = field(compare=False, repr=False)

    @property
    def cached(self) -> bool:
        """Whether Triton's cache holds it."""
        return is_cached(self.name, self.key)


def is_cached(name: str, key: str) -> bool:
    """Whether Triton's cache holds the binary of the kernel `name` with this key."""
    knobs, file = triton.knobs.cache, f"{name[:150]}.json"
    if knobs.manager_class is None:
        # Asking Triton would create the directory.
        folder = Path(knobs.dir) / key
        return (folder / f"__grp__{file}").is_file() and (folder / file).is_file()
    return file in (knobs.manager_class(key).get_group(file) or {})


@dataclass(frozen=True)
class _Launch:
    """What Triton would compile: its key within the process, and the arguments of ``_do_compile``."""

    function: Any
    key: str
    arguments: tuple[Any, ...]

    def binary(self, form: ActivationFormat, tokens: int) -> Binary:
        """The launch as a `Binary`, found in a call of `tokens`."""
        _, types, _, constants, options, attributes, _ = self.arguments
        target = triton.runtime.driver.active.get_current_target()
        source = self.function.ASTSource(self.function, types, constants, attributes)
        return Binary(
            self.function.fn.__name__,
            _cache_key(source, target, options),
            form,
            tokens,
            lambda: _compile(self.function, *self.arguments),
        )


def _cache_key(source: Any, target: Any, options: Any) -> str:
    """The name of a directory in Triton's cache, as ``triton.compile`` computes it."""
    backend = make_backend(target)
    parsed = backend.parse_options(dict(options.__dict__))
    key = get_cache_key(source, backend, parsed, env_vars=get_cache_invalidating_env_vars())
    return str(_base32(hashlib.sha256(key.encode()).hexdigest()))


_compile: Any = getattr(JITFunction, "_do_compile", None)
"""Triton's own function, which `recording` replaces for the calling thread."""


COMPILE_PARAMETERS = ["key", "signature", "device", "constexprs", "options", "attrs", "warmup"]
"""Parameters of `_compile` after the function."""


@contextmanager
def recording() -> Iterator[list[_Launch]]:
    """A context in which this thread's launches are neither compiled nor run, but appended to a list.

    Other threads launch as usual. Raises UsageError for a Triton whose functions are not known.
    """
    if _compile is None or [*signature(_compile).parameters][1:] != COMPILE_PARAMETERS:
        raise UsageError(
            f"kernels of Triton {triton.__version__} cannot be compiled ahead", hint="install triton 3.6"
        )
    owner, launched = threading.get_ident(), list[_Launch]()
    plain_run = JITFunction.run

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if threading.get_ident() != owner:
            return plain_run(kernel, *args, grid=grid, warmup=warmup, **options)
        device = triton.runtime.driver.active.get_current_device()
        caches = kernel.device_caches[device]
        # Without what is compiled already, which has to be found as well.
        kept = dict(caches[0])
        caches[0].clear()
        try:
            return plain_run(kernel, *args, grid=grid, warmup=True, **options)
        finally:
            caches[0].update(kept)

    def record(kernel: Any, key: str, *arguments: Any) -> Any:
        if threading.get_ident() != owner:
            return _compile(kernel, key, *arguments)
        launched.append(_Launch(kernel, key, (key, *arguments)))
        return None

    with patch.object(JITFunction, "run", run), patch.object(JITFunction, "_do_compile", record):
        yield launched


def binaries_of(
    layer: PreparedMoE,
    runner: Runner,
    device: torch.device,
    most: int = MOST_TOKENS,
    forms: tuple[ActivationFormat, ...] = FORMS,
) -> tuple[Binary, ...]:
    """Every binary that `layer` needs for 1 to `most` tokens, without duplicates, by number of tokens.

    The launch is asked for every number of tokens. Between two numbers with the same launch, what else
    changes (sizes of sorts and sums) changes once and for good, so that it is found by bisection.

    Args:
        layer: with its tensors on the device ``meta``, see `without_weights`.
        runner: of one of the backends `OWN`.
        device: the GPU; one that is not here in `offline_gpu.standing_in`.
        most: tokens, or rows of an expert for batched activations.
    """
    layer.derived[CHOSEN_FOR] = device
    walks = [_Walk(layer, runner, form) for form in forms]
    for walk in walks:
        for first, last in walk.same_launches(most):
            walk.bisect(first, last)
    return _found(walks)


def binaries_at(
    layer: PreparedMoE,
    runner: Runner,
    device: torch.device,
    calls: Iterable[tuple[ActivationFormat, int]],
) -> tuple[Binary, ...]:
    """`binaries_of` the given calls alone: those of `Binary.form` and `Binary.tokens` launch every binary."""
    layer.derived[CHOSEN_FOR] = device
    walks: dict[ActivationFormat, _Walk] = {}
    for form, tokens in calls:
        if form not in walks:
            walks[form] = _Walk(layer, runner, form)
        walks[form].launches(tokens)
    return _found(walks.values())


def _found(walks: Iterable[_Walk]) -> tuple[Binary, ...]:
    found: dict[str, Binary] = {}
    for walk in walks:
        for tokens in sorted(walk.seen):
            for launch in walk.seen[tokens]:
                found.setdefault(walk.binaries[launch].key, replace(walk.binaries[launch], tokens=tokens))
    return tuple(found.values())


def without_weights(layer: PreparedMoE) -> PreparedMoE:
    """`layer` with its tensors on the device ``meta``, for `binaries_of`.

    Kernels that depend on the range of the scales are those for the scales of `layer`.
    """
    # Not empty_like, which imports sympy for the device meta: half a second in a process that lacks it.
    weights = {
        role: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
        for role, t in layer.weights.items()
    }
    bare = replace(layer, weights=weights, derived={})
    if layer.backend == RUNNER.name:
        known, made = layer_of(layer), layer_of(bare)
        if not isinstance(known, KernelLayer) or not isinstance(made, KernelLayer):
            return bare
        bare.derived[LAYER] = replace(
            made,
            w13=replace(made.w13, exponents=known.w13.exponents),
            w2=replace(made.w2, exponents=known.w2.exponents),
        )
    return bare


def ranges_needed(bare: PreparedMoE) -> tuple[frozenset[range], ...]:
    """For each matrix the ranges of exponents outside of which binaries that `bare` launched are wrong."""
    made = layer_of(bare) if bare.backend == RUNNER.name else None
    if not isinstance(made, KernelLayer):
        return ()
    return frozenset(made.w13.relied_on), frozenset(made.w2.relied_on)


def rely_on(layer: PreparedMoE, ranges: tuple[frozenset[range], ...]) -> None:
    """Makes refits of `layer` refuse scales outside of `ranges`, which are from `ranges_needed`."""
    made = layer_of(layer) if ranges else None
    if isinstance(made, KernelLayer):
        for matrix, needed in zip((made.w13, made.w2), ranges, strict=True):
            matrix.relied_on.update(needed)


def scale_forms(layer: PreparedMoE) -> tuple[bool, ...]:
    """What the binaries of a layer depend on besides its problem: forms of the code for ranges of scales."""
    made = layer_of(layer) if layer.backend == RUNNER.name else None
    if not isinstance(made, KernelLayer):
        return ()
    return tuple(
        form
        for m in (made.w13, made.w2)
        for form in (exact_weights(made.problem, m), m.exponents_within(EXACT_SCALES))
    )


class _Walk:
    """The launches of a layer in one activation format, for the numbers of tokens that were asked."""

    def __init__(self, layer: PreparedMoE, runner: Runner, form: ActivationFormat) -> None:
        self.layer, self.form = layer, form
        run = runner.in_form(form)
        if run is None or runner.name not in OWN:
            raise UsageError(f"the {runner.name} backend has no kernels of moectl's for {form.says}")
        self.run, self.tactic = run, runner.tactic
        self.seen: dict[int, tuple[tuple[Any, str], ...]] = {}
        self.binaries: dict[tuple[Any, str], Binary] = {}

    def same_launches(self, most: int) -> Iterator[tuple[int, int]]:
        """Ranges of tokens, both ends included, in which the layer has the same launch."""
        first, last_tactic = 1, self._tactic(1)
        for tokens in range(2, most + 1):
            tactic = self._tactic(tokens)
            if tactic != last_tactic:
                yield first, tokens - 1
                first, last_tactic = tokens, tactic
        yield first, most

    def _tactic(self, tokens: int) -> str:
        if self.form is ActivationFormat.BATCHED:
            return self.tactic(layer_one_each(self.layer), tokens * self.layer.problem.local_experts)
        return self.tactic(self.layer, tokens)

    def bisect(self, first: int, last: int) -> None:
        """Records the launches of every number of tokens from `first` to `last` that differ."""
        if self.launches(first) == self.launches(last) or last - first < 2:
            return
        middle = (first + last) // 2
        self.bisect(first, middle)
        self.bisect(middle, last)

    def launches(self, tokens: int) -> tuple[tuple[Any, str], ...]:
        """(function, key within the process) of every launch of a call, in order."""
        if tokens not in self.seen:
            with recording() as launched:
                self.run(self.layer, *self._arguments(tokens))
            keys = tuple((launch.function, launch.key) for launch in launched)
            for key, launch in zip(keys, launched, strict=True):
                if key not in self.binaries:
                    self.binaries[key] = launch.binary(self.form, tokens)
            self.seen[tokens] = keys
        return self.seen[tokens]

    def _arguments(self, tokens: int) -> tuple[Tensor, ...]:
        problem = self.layer.problem
        dtype = TORCH_DTYPES[MODEL_DTYPES[problem.dtype]]

        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        if self.form is ActivationFormat.BATCHED:
            experts = problem.local_experts
            counts = empty(experts, dtype=torch.int32)
            return empty(experts, tokens, problem.dims.hidden, dtype=dtype), counts
        chosen = (tokens, problem.top_k)
        return (
            empty(tokens, problem.dims.hidden, dtype=dtype),
            empty(*chosen, dtype=torch.int32),
            empty(*chosen, dtype=torch.float32),
        )


@dataclass
class CompileCount:
    """Kernels that Triton compiled and took from its cache."""

    compiled: int = 0
    cached: int = 0


@contextmanager
def counting() -> Iterator[CompileCount]:
    """A context that counts what Triton compiles, in all threads and of all kernels."""
    count, knobs = CompileCount(), triton.knobs.compilation
    before = knobs.listener

    def listen(**about: Any) -> None:
        if about["cache_hit"]:
            count.cached += 1
        else:
            count.compiled += 1
        if before is not None:
            before(**about)

    knobs.listener = listen
    try:
        yield count
    finally:
        knobs.listener = before

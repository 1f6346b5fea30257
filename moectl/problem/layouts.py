"""Kernel layouts: the target that selects each, and the engines and kernels that read it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayoutReader:
    """An engine and its backends that read a layout."""

    engine: str
    backends: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.engine} {', '.join(self.backends)}"


@dataclass(frozen=True, slots=True)
class LayoutFacts:
    """Static facts about a layout.

    Attributes:
        target: value of ``--to``; the scheme, then activations and architecture, select the layout.
        archs: device architectures with kernels for it.
        readers: engines and backends that read it.
        acts: supported activation formats, the usual one first; ``-per-token`` if every token has its own
            global scale.
        instead_of: the layout that is used unless an engine is configured for, or for moectl's own layouts a
            checkpoint declares, other activations.
        by_values: True if engines choose it for some layers by the values of their weights.
        verified: False if it was implemented from source code and never compared with a recorded conversion.
    """

    target: str
    archs: tuple[str, ...]
    readers: tuple[LayoutReader, ...]
    acts: tuple[str, ...] = ("a16",)
    instead_of: str = ""
    verified: bool = True
    by_values: bool = False


_SM10X = ("sm100", "sm103", "sm110")
_SM12X = ("sm120", "sm121")
_SM90_UP = ("sm90", *_SM10X, *_SM12X)
_SM89_UP = ("sm89", *_SM90_UP)
_SM80_UP = ("sm80", "sm86", "sm87", *_SM89_UP)
_HUMMING_ARCHS = ("sm75", "sm80", "sm86", "sm87", "sm89", "sm90")
_NOT_SM90 = ("sm89", *_SM10X, *_SM12X)
_TRTLLM_ARCHS = ("sm100", "sm103")
_CPU = ("x86",)
_CDNA4 = ("gfx950",)


def _vllm(*backends: str) -> LayoutReader:
    return LayoutReader("vLLM", backends)


def _flashinfer(*functions: str) -> LayoutReader:
    return LayoutReader("FlashInfer", functions)


def _marlin(act: str = "a16", instead_of: str = "", runner: str = "") -> LayoutFacts:
    archs = {"a16": ("sm75", *_SM80_UP), "int8": ("sm75", *_SM80_UP), "fp8": ("sm89", *_SM12X)}[act]
    own = (LayoutReader("moectl", (runner,)),) if runner else ()
    return LayoutFacts("marlin", archs, (_vllm("marlin", "batched_marlin"), *own), (act,), instead_of)


def _trtllm(function: str, *acts: str, backends: tuple[str, ...] = ("flashinfer_trtllm",)) -> LayoutFacts:
    own = LayoutReader("moectl", tuple(f"{name}{form}" for name in backends for form in ("", "_monolithic")))
    return LayoutFacts("trtllm", _TRTLLM_ARCHS, (_vllm(*backends), _flashinfer(function), own), acts)


_OWN = LayoutReader("moectl", ("moectl",))
_OWN_CUTLASS = LayoutReader("moectl", ("flashinfer_cutlass",))
_OWN_PLAIN = LayoutReader("moectl", ("triton", "cutlass"))
_OWN_GROUPED = LayoutReader("moectl", ("torch_grouped", "deep_gemm", "batched_deep_gemm"))


def _cutlass(
    target: str, archs: tuple[str, ...], act: str, *backends: str, own: tuple[LayoutReader, ...] = ()
) -> LayoutFacts:
    return LayoutFacts(target, archs, (_vllm(*backends), _flashinfer("cutlass_fused_moe"), *own), (act,))


def _humming(
    act: str = "a16",
    instead_of: str = "",
    *,
    archs: tuple[str, ...] = _HUMMING_ARCHS,
    target: str = "humming",
    own: bool = False,
) -> LayoutFacts:
    readers = (_vllm("humming"), LayoutReader("humming-kernels", ("humming_forward",)))
    runner = (LayoutReader("moectl", ("humming", "humming_grouped")),) if own else ()
    by_values = target in ("humming-e0m", "humming-rows")
    return LayoutFacts(target, archs, (*readers, *runner), (act,), instead_of, by_values=by_values)


def _aiter(
    act: str,
    kernels: str,
    *backends: str,
    instead_of: str = "",
    archs: tuple[str, ...] = _CDNA4,
) -> LayoutFacts:
    readers = (_vllm("aiter", *backends), LayoutReader("AITER", (f"fused_moe ({kernels})",)))
    return LayoutFacts("aiter", archs, readers, (act,), instead_of, verified=False)


def _cpu(target: str = "cpu") -> LayoutFacts:
    return LayoutFacts(target, _CPU, (_vllm("cpu"),), verified=False)


LAYOUTS: Mapping[str, LayoutFacts] = {
    "marlin-int4": _marlin(runner="moectl_marlin"),
    "marlin-int4-act-int8": _marlin("int8", "marlin-int4"),
    "marlin-int4-act-fp8": _marlin("fp8", "marlin-int4"),
    "marlin-int8": _marlin(),
    "marlin-int8-act-int8": _marlin("int8", "marlin-int8"),
    "marlin-mxfp4": _marlin(),
    "marlin-mxfp4-act-fp8": _marlin("fp8", "marlin-mxfp4"),
    "marlin-nvfp4": _marlin(),
    "marlin-fp8": _marlin(),
    "marlin-mxfp8": _marlin(),
    "trtllm-mxfp4": _trtllm(
        "trtllm_fp4_block_scale_moe",
        "a16",
        "mxfp8",
        backends=("flashinfer_trtllm", "flashinfer_trtllm_afp8"),
    ),
    "trtllm-mxint4": _trtllm("trtllm_mxint4_block_scale_moe", "a16"),
    "trtllm-nvfp4": _trtllm("trtllm_fp4_block_scale_moe", "nvfp4"),
    "trtllm-nvfp4-act-nvfp4-per-token": LayoutFacts(
        "trtllm",
        _TRTLLM_ARCHS,
        (_vllm("flashinfer_trtllm"), _flashinfer("trtllm_fp4_block_scale_moe")),
        ("nvfp4-per-token",),
        "trtllm-nvfp4",
        verified=False,
    ),
    "trtllm-fp8-block": _trtllm("trtllm_fp8_block_scale_moe", "fp8"),
    "trtllm-fp8-tensor": _trtllm("trtllm_fp8_per_tensor_scale_moe", "fp8"),
    "trtllm-mxfp8": _trtllm("trtllm_fp8_block_scale_moe", "mxfp8"),
    "trtllm-bf16": _trtllm("trtllm_bf16_moe", "a16"),
    "triton-hopper": LayoutFacts(
        "triton-hopper",
        ("sm90",),
        (
            _vllm("triton", "triton_unfused"),
            LayoutReader("triton_kernels", ("matmul_ogs",)),
            LayoutReader("moectl", ("triton_kernels",)),
        ),
    ),
    "triton-blackwell": LayoutFacts(
        "triton-blackwell",
        (*_SM10X, *_SM12X),
        (_vllm("triton", "triton_unfused"), LayoutReader("triton_kernels", ("matmul_ogs",))),
    ),
    "cutlass-sm90": _cutlass("cutlass-sm90", ("sm90",), "a16", "flashinfer_cutlass", own=(_OWN_CUTLASS,)),
    "cutlass-fp8-block": _cutlass(
        "cutlass-sm90", ("sm90",), "fp8", "flashinfer_cutlass", own=(_OWN_CUTLASS,)
    ),
    "cutlass-fp8-tensor": _cutlass("cutlass-sm90", _SM90_UP, "fp8", "flashinfer_cutlass"),
    "cutlass-bf16": LayoutFacts(
        "cutlass-sm90",
        _SM90_UP,
        (_vllm("flashinfer_cutlass"), _flashinfer("cutlass_fused_moe"), _OWN_CUTLASS),
        verified=False,
    ),
    "cutlass-sm100": _cutlass("cutlass-sm100", (*_SM10X, *_SM12X), "mxfp8", "flashinfer_cutlass_afp8"),
    "flashinfer-cutlass-nvfp4": LayoutFacts(
        "cutlass-sm100",
        (*_SM10X, *_SM12X),
        (
            _vllm("flashinfer_cutlass", "flashinfer_b12x"),
            _flashinfer("cutlass_fused_moe", "b12x_fused_moe"),
        ),
        ("nvfp4", "a16"),
    ),
    "cutlass-mxfp4": LayoutFacts("cutlass", (*_SM10X,), (_vllm("cutlass"),), ("mxfp4",)),
    "cutlass-nvfp4": LayoutFacts("cutlass", (*_SM10X, *_SM12X), (_vllm("cutlass"),), ("nvfp4",)),
    "cutedsl-nvfp4": LayoutFacts(
        "cutedsl",
        _TRTLLM_ARCHS,
        (_vllm("flashinfer_cutedsl"), _flashinfer("cute_dsl_fused_moe_nvfp4")),
        ("nvfp4",),
    ),
    "cutedsl-batched-nvfp4": LayoutFacts(
        "cutedsl-batched",
        _TRTLLM_ARCHS,
        (_vllm("flashinfer_cutedsl_batched"), _flashinfer("grouped_gemm_nt_masked")),
        ("nvfp4",),
        verified=False,
    ),
    "b12x-nvfp4": LayoutFacts("b12x", _SM12X, (_vllm("b12x"),), ("nvfp4",)),
    "b12x-mxfp4": LayoutFacts("b12x", _SM12X, (_vllm("b12x"),), ("a16", "mxfp8")),
    "humming-int4": _humming(archs=_HUMMING_ARCHS + _SM10X + _SM12X, own=True),
    "humming-int4-act-fp8": _humming("fp8", "humming-int4", archs=_NOT_SM90),
    "humming-int4-act-fp8-sm90": _humming("fp8", "humming-int4", archs=("sm90",)),
    "humming-int8": _humming(archs=_HUMMING_ARCHS + _SM10X + _SM12X, own=True),
    "humming-int4-e0m3": _humming(archs=_HUMMING_ARCHS + _SM10X + _SM12X, target="humming-e0m"),
    "humming-int4-e0m3-act-fp8": _humming("fp8", "humming-int4-e0m3", archs=_NOT_SM90, target="humming-e0m"),
    "humming-int4-e0m3-act-fp8-sm90": _humming(
        "fp8", "humming-int4-e0m3", archs=("sm90",), target="humming-e0m"
    ),
    "humming-int8-e0m7": _humming(archs=_HUMMING_ARCHS + _SM10X + _SM12X, target="humming-e0m"),
    "humming-mxfp4": _humming(own=True),
    "humming-mxfp4-act-fp8": _humming("fp8", "humming-mxfp4", archs=("sm90",)),
    "humming-nvfp4": _humming(own=True),
    "humming-nvfp4-rows": _humming(target="humming-rows"),
    "humming-fp8": _humming(own=True),
    "humming-fp8-act-fp8": _humming("fp8", "humming-fp8", archs=("sm90",), own=True),
    "humming-mxfp8": _humming(own=True),
    "humming-mxfp4-sm100": _humming(archs=_SM10X + _SM12X, target="humming-sm100"),
    "humming-mxfp4-act-mxfp8-sm100": _humming(
        "mxfp8", "humming-mxfp4-sm100", archs=_SM10X, target="humming-sm100"
    ),
    "humming-mxfp4-act-mxfp8-sm120": _humming(
        "mxfp8", "humming-mxfp4-sm100", archs=_SM12X, target="humming-sm100"
    ),
    "humming-nvfp4-sm100": _humming(archs=_SM10X + _SM12X, target="humming-sm100"),
    "humming-fp8-sm100": _humming(archs=_SM10X + _SM12X, target="humming-sm100"),
    "humming-mxfp8-sm100": _humming(archs=_SM10X + _SM12X, target="humming-sm100"),
    "aiter-bf16": _aiter("a16", "CK", archs=("gfx942", *_CDNA4)),
    "aiter-fp8": _aiter("fp8", "CK"),
    "aiter-mxfp4": _aiter("a16", "CK, FlyDSL", "aiter_mxfp4_mxfp4"),
    "aiter-mxfp4-act-mxfp4": _aiter("mxfp4", "CK, FlyDSL", "aiter_mxfp4_mxfp4", instead_of="aiter-mxfp4"),
    "aiter-mxfp8": _aiter("mxfp8", "FlyDSL"),
    "plain-bf16": LayoutFacts(
        "triton",
        ("sm75", *_SM80_UP),
        (_vllm("triton", "batched_triton"), LayoutReader("moectl", ("triton", "sonic_moe")), _OWN_GROUPED),
        verified=False,
    ),
    "plain-fp8": LayoutFacts(
        "triton",
        _SM89_UP,
        (_vllm("triton", "batched_triton", "cutlass", "batched_cutlass"), _OWN_PLAIN, _OWN_GROUPED),
        ("fp8",),
        verified=False,
    ),
    "plain-fp8-halves": LayoutFacts("triton-halves", _SM89_UP, (_OWN_PLAIN,), ("fp8",), verified=False),
    "triton-wna16": LayoutFacts("triton", ("sm75", *_SM80_UP), (_vllm("triton"),), verified=False),
    "cpu-bf16": _cpu(),
    "cpu-bf16-vec": _cpu("cpu-vec"),
    "cpu-amx-fp8": _cpu(),
    "cpu-amx-mxfp4": _cpu(),
    "cpu-amx-int4": _cpu(),
    "moectl-mtile64": LayoutFacts("moectl", _SM80_UP, (_OWN,)),
    "moectl-bf16": LayoutFacts("moectl", _SM80_UP, (_OWN,)),
    "moectl-fp8": LayoutFacts("moectl", _SM80_UP, (_OWN,), ("fp8", "a16")),
    "moectl-int4": LayoutFacts("moectl", _SM80_UP, (_OWN,), ("int8",), instead_of="moectl-mtile64"),
    "moectl-int8": LayoutFacts("moectl", _SM80_UP, (_OWN,), ("int8",), instead_of="moectl-mtile64"),
}
"""Facts by layout name."""


OWN_TARGET = "moectl"
"""The target of moectl's own kernels."""

OWN_LAYOUTS = tuple(name for name, facts in LAYOUTS.items() if facts.target == OWN_TARGET)
"""Layouts of moectl's own kernels, which run in engines too."""


@dataclass(frozen=True, slots=True)
class DirectoryReader:
    """Who loads directories that were converted to a kernel layout.

    Attributes:
        program: the engine or library.
        how: its commands, or what it needs.
        layouts: the layouts that it takes as they are; empty for all.
        serve: the command that serves a directory; empty for one that does not serve requests.
        ranks: its option for the number of ranks; `experts`: that for experts distributed over some of them.
        mixed: whether it slices experts that it distributes.
        take_over: its option that gives moectl the experts of a published checkpoint.
    """

    program: str
    how: tuple[str, ...]
    layouts: tuple[str, ...] = ()
    serve: str = ""
    ranks: str = ""
    experts: str = ""
    mixed: bool = False
    take_over: str = ""

    def command(self, path: str, tp_size: int = 1, ep_size: int = 1) -> str:
        """The command line that serves `path` with each expert in `tp_size` slices, over `ep_size` groups of
        ranks; empty if it cannot.

        Example:
            >>> vllm = next(reader for reader in FOLDER_READERS if reader.program == "vLLM")
            >>> vllm.command("./out", 2), vllm.command("./out", 2, 2)
            ('vllm serve ./out --tensor-parallel-size 2', '')
        """
        if not self.serve or (tp_size > 1 and ep_size > 1 and not self.mixed):
            return ""
        return self.spelled(path, tp_size * ep_size, ep_size)

    def spelled(self, path: str, ranks: int, groups: int) -> str:
        """The command line with numbers as the engine counts: ranks, and groups of them for experts."""
        words = [self.serve.format(shlex.quote(path))]
        words += [self.ranks.format(ranks)] if ranks > 1 else []
        words += [self.experts.format(groups)] if groups > 1 else []
        return " ".join(words)

    def __str__(self) -> str:
        return f"{self.program} {', '.join(self.how)}"


FOLDER_READERS: tuple[DirectoryReader, ...] = (
    DirectoryReader("moectl", ("run", "bench", "load_prepared")),
    DirectoryReader("transformers", ("moectl.integrations.transformers",)),
    DirectoryReader(
        "vLLM",
        ("0.33 with moectl[vllm]",),
        (
            *OWN_LAYOUTS,
            *("marlin-mxfp4", "marlin-int4", "marlin-int8"),
            *("triton-hopper", "triton-blackwell", "cutlass-sm90", "trtllm-mxfp4"),
            *("humming-int4", "humming-int4-e0m3", "humming-int8", "humming-int8-e0m7"),
            *("humming-mxfp4", "humming-nvfp4", "humming-nvfp4-rows", "humming-fp8", "humming-mxfp8"),
            *("humming-mxfp4-sm100", "humming-nvfp4-sm100", "humming-fp8-sm100", "humming-mxfp8-sm100"),
        ),
        "vllm serve {}",
        "--tensor-parallel-size {}",
        "--enable-expert-parallel",
        take_over="--quantization moectl",
    ),
    DirectoryReader(
        "SGLang",
        ("0.5.23 with moectl[sglang]",),
        OWN_LAYOUTS,
        "sglang serve --model-path {}",
        "--tp-size {}",
        "--ep-size {}",
        mixed=True,
        take_over="--quantization moectl",
    ),
)
"""Who loads a directory converted to a kernel layout. A plug-in for an engine adds its row here.

The readers of `LAYOUTS` use the layout in memory; they repack ordinary checkpoints themselves.
"""


def folder_readers(layout: str) -> tuple[DirectoryReader, ...]:
    """Those of `FOLDER_READERS` that load directories in `layout` as they are."""
    return tuple(reader for reader in FOLDER_READERS if not reader.layouts or layout in reader.layouts)


def loads_folder(engine: str, layout: str) -> bool:
    """True if `engine` (such as ``vLLM``, in any case) loads directories in `layout` as they are."""
    return any(reader.program.casefold() == engine.casefold() for reader in folder_readers(layout))


TARGETS: Mapping[str, tuple[LayoutReader, ...]] = {
    facts.target: tuple(
        dict.fromkeys(r for other in LAYOUTS.values() if other.target == facts.target for r in other.readers)
    )
    for facts in LAYOUTS.values()
}
"""Readers by target: the closed list of ``moectl convert --to``."""

ACTS: tuple[str, ...] = tuple(dict.fromkeys(act for facts in LAYOUTS.values() for act in facts.acts))
"""Every activation format that selects a layout."""

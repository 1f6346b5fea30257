"""FlashInfer's TRT-LLM kernels on SM10x, as this tool calls them: routed before, or by the kernel itself."""

from collections.abc import Iterable

from ...capabilities.flashinfer import TRTLLM, Kernel, kernel_of
from ...problem import MoEProblem
from ...schemes import A16, MXFP4, MXFP8_ACT
from ..archs import SM10X
from ..backend import NAIVE, Backend, Capability, Offer, Variant, only
from ..keys import exact_key
from .peer_flashinfer import Find, declared, forms, needs, offers, rules

_MXFP4_FP8 = tuple(kernel for kernel in TRTLLM if (kernel.weight, kernel.act) == (MXFP4, MXFP8_ACT))


def _with_fp8_tokens(problem: MoEProblem) -> Kernel | None:
    """The kernel for MXFP4 weights and MXFP8 tokens, also of a checkpoint that declares 16-bit ones."""
    scheme = problem.scheme
    return kernel_of(_MXFP4_FP8, scheme.weight, MXFP8_ACT) if scheme.act in (A16, MXFP8_ACT) else None


def _backend(
    name: str, kernels: tuple[Kernel, ...], find: Find, pairs: tuple[Offer, ...], *, logits: bool, note: str
) -> Backend:
    functions: Iterable[str] = ((kernel.logits if logits else kernel.routed) for kernel in kernels)
    return Backend(
        name=name,
        engine_name=name,
        variants=(
            Variant(
                "logits" if logits else "ids and weights",
                Capability(
                    arch=(SM10X,),
                    needs=needs(functions),
                    offers=pairs,
                    spread=NAIVE,
                    act_order=False,
                    rules=rules(find, routes=logits),
                ),
                monolithic=logits,
            ),
        ),
        forms=forms(kernels),
        runner=name,
        note=note,
    )


_ANY_TOKENS = (Offer(frozenset({exact_key(MXFP4)}), only("a16", "mxfp8")),)
_FP8_NOTE = "Tokens are rounded to MXFP8, which the checkpoint does not ask for: only when asked for by name."

PEER_TRTLLM = _backend("flashinfer_trtllm", TRTLLM, declared(TRTLLM), offers(TRTLLM), logits=False, note="")
PEER_TRTLLM_MONOLITHIC = _backend(
    "flashinfer_trtllm_monolithic", TRTLLM, declared(TRTLLM), offers(TRTLLM), logits=True, note=""
)
PEER_TRTLLM_FP8 = _backend(
    "flashinfer_trtllm_afp8", _MXFP4_FP8, _with_fp8_tokens, _ANY_TOKENS, logits=False, note=_FP8_NOTE
)
PEER_TRTLLM_FP8_MONOLITHIC = _backend(
    "flashinfer_trtllm_afp8_monolithic",
    _MXFP4_FP8,
    _with_fp8_tokens,
    _ANY_TOKENS,
    logits=True,
    note=_FP8_NOTE,
)

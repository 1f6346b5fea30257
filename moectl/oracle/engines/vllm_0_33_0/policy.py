"""Which fused-MoE backend vLLM 0.33.0 chooses: routes, one module per family of formats.

Orders, conditions and sizes are those of the release; `devtools.conformance` compares them with
decisions recorded from it.
"""

from ...backend import ANY, only
from ...policy import ExchangeSizes, Policy, ServeOptions
from .backends.defaults import mxfp4_forms
from .routes import bf16, fp8, integers, mxfp4, mxfp4_native, mxfp8, nvfp4, w4a8
from .routes.refusals import REFUSALS
from .routes.terms import activation, dtype, routing
from .variables import HISTORY, VARIABLES, VERSION

_LOW_LATENCY = ExchangeSizes(sizes=(2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192))
_HIGH_THROUGHPUT = ExchangeSizes(multiple_bytes=512)

_BALANCING = {
    "UnquantizedFusedMoEMethod": ANY,
    "Fp8MoEMethod": ANY,
    "CompressedTensorsW8A8Fp8MoEMethod": ANY,
    "ModelOptNvFp4FusedMoE": ANY,
    "Mxfp4MoEMethod": ANY,
    "QuarkOCP_MX_MoEMethod": ANY,
    "QuarkW8A8Mxfp8MoEMethod": ANY,
    "CompressedTensorsWNA16MoEMethod": only("TRITON"),
    "CompressedTensorsW4A4Nvfp4MoEMethod": only(
        "FLASHINFER_CUTEDSL",
        "FLASHINFER_CUTEDSL_BATCHED",
        "FLASHINFER_TRTLLM",
        "FLASHINFER_MOE_EP_CUTEDSL",
    ),
    "CompressedTensorsW4A4Mxfp4MoEMethod": only("FLASHINFER_MOE_EP_CUTEDSL", "FLASHINFER_MOE_EP_DEEP_GEMM"),
}
"""Methods that support EPLB. Recorded decisions end before this check, so it only makes a note."""

POLICY = Policy(
    name="vllm-0.33.0",
    routes=(
        *bf16.ROUTES,
        *fp8.ROUTES,
        *mxfp4_native.ROUTES,
        *mxfp4.ROUTES,
        *mxfp8.ROUTES,
        *nvfp4.ROUTES,
        *integers.ROUTES,
        *w4a8.ROUTES,
    ),
    platforms=frozenset({"cuda", "rocm", "cpu", "xpu", "tpu", "out-of-tree"}),
    accepted_names=only(*HISTORY.backends.at(VERSION)),
    exchanges=frozenset(
        {
            "allgather_reducescatter",
            "deepep_high_throughput",
            "deepep_low_latency",
            "deepep_v2",
            "flashinfer_all2allv",
            "flashinfer_nvlink_one_sided",
            "flashinfer_nvlink_two_sided",
            "moonep",
            "mori_high_throughput",
            "mori_low_latency",
            "nixl_ep",
        }
    ),
    default_exchange="allgather_reducescatter",
    serve=ServeOptions(
        command="vllm serve {}",
        backend="vllm serve --moe-backend {}",
        tensor="--tensor-parallel-size {}",
        data="--data-parallel-size {}",
        expert="--enable-expert-parallel",
        exchange="--all2all-backend {}",
        dtype="--dtype {}",
        pipeline="--pipeline-parallel-size {}",
        adapters="--enable-lora",
        activation="""--quantization-config '{{"moe":{{"activation":"{}"}}}}'""",
    ),
    dtype=dtype,
    activation=activation,
    routing=routing,
    invariance=VARIABLES["VLLM_BATCH_INVARIANT"],
    refusals=REFUSALS,
    balancing=_BALANCING,
    variables=VARIABLES,
    default_forms={"mxfp4": mxfp4_forms("")},
    exchange_packages={
        "deepep_high_throughput": "deep_ep",
        "deepep_low_latency": "deep_ep",
        "deepep_v2": "deep_ep",
        "flashinfer_nvlink_one_sided": "flashinfer",
        "flashinfer_nvlink_two_sided": "flashinfer",
    },
    batching_exchanges=frozenset({"deepep_low_latency", "nixl_ep"}),
    sequence_exchanges=frozenset(
        {
            "allgather_reducescatter",
            "deepep_high_throughput",
            "deepep_low_latency",
            "deepep_v2",
            "flashinfer_nvlink_one_sided",
            "mori_high_throughput",
            "mori_low_latency",
            "nixl_ep",
        }
    ),
    exchange_sizes={
        "deepep_high_throughput": _HIGH_THROUGHPUT,
        "deepep_v2": _HIGH_THROUGHPUT,
        "deepep_low_latency": _LOW_LATENCY,
        "nixl_ep": _LOW_LATENCY,
    },
)

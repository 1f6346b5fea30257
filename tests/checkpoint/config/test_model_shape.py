"""Sizes of a model outside its experts."""

from dataclasses import replace

import pytest

from moectl.checkpoint import open_checkpoint
from moectl.checkpoint.config.model_shape import model_shape
from moectl.problem.model_shape import UNKNOWN_MODEL, ModelShape


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("openai/gpt-oss-120b", ModelShape(64, 8, 201088, 36, "GptOssForCausalLM", "gpt_oss")),
        # Latent attention: KV heads are not sharded.
        ("moonshotai/Kimi-K2-Instruct", ModelShape(64, 0, 163840, 61, "DeepseekV3ForCausalLM", "kimi_k2")),
        # In text_config.
        (
            "meta-llama/Llama-4-Scout-17B-16E-Instruct",
            ModelShape(40, 8, 202048, 48, "Llama4ForConditionalGeneration", "llama4"),
        ),
        # Under other names.
        ("databricks/dbrx-instruct", ModelShape(48, 8, 100352, 40, "DbrxForCausalLM", "dbrx")),
    ],
)
def test_shapes_of_published_models(name, shape):
    # Which matrices engines check against blocks is test_other_weights'.
    assert replace(open_checkpoint(name, offline=True).model, blocked=()) == shape


@pytest.mark.parametrize("value", [0, -4, True, "64", 6.5, [64], 1 << 40, None])
def test_what_is_no_size_is_unknown(value):
    config = {"num_attention_heads": value, "num_key_value_heads": value, "vocab_size": value}
    assert model_shape({**config, "architectures": value}) == UNKNOWN_MODEL

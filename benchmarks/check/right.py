"""Right implementations of other libraries, as they are installed, or in a few lines of `right/` where more than a name is needed."""

from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HEADS: dict[str, Any] = {"d_model": 24, "num_heads": 3, "projections": False}
GROUPED: dict[str, Any] = {"d_model": 24, "num_heads": 6, "num_kv_heads": 2, "head_dim": 8, "bias": False}
HALVES: dict[str, Any] = {"interleaved": False}


@dataclass(frozen=True, slots=True)
class Right:
    """Something that is right, and the conventions that its author would give, if asked."""

    shown: str  # my_package:NAME, or FILE:NAME in `right/`
    package: str
    spec: dict[str, Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def target(self) -> str:
        return str(Path(__file__).parent / "right" / self.shown) if ".py:" in self.shown else self.shown

    @property
    def installed(self) -> bool:
        return find_spec(self.package) is not None


CAUSAL: dict[str, Any] = {"causal": True}
TORCH: dict[str, Any] = {"framework": "torch"}
ATTEND: dict[str, Any] = {"mask_means": "attend"}
ROPE: dict[str, Any] = {**GROUPED, "rope": HALVES}

RIGHT = (
    Right("torch.nn:MultiheadAttention", "torch"),
    Right("torch.nn.functional:scaled_dot_product_attention", "torch", options={**TORCH, **ATTEND}),
    Right("torch.nn.attention.flex_attention:flex_attention", "torch", options=TORCH),
    Right("torch_layers.py:flex_causal", "torch", options={**TORCH, **CAUSAL, "query_offset": "start"}),
    Right("torch_layers.py:FlexCapped", "torch", {"d_model": 24, "num_heads": 3, "softcap": 2.0, "bias": False}),
    Right("torch_layers.py:encoder_attention", "torch"),
    Right("torch_layers.py:decoder_cross_attention", "torch"),
    Right("transformers_layers.py:bert_eager", "transformers", options={"mask_means": "add"}),
    Right("transformers_layers.py:bert_sdpa", "transformers", options={"mask_means": "add"}),
    Right("transformers_layers.py:clip_eager", "transformers", options={"mask_means": "add", "mask_shape": "b,1,q,k"}),
    Right("transformers_layers.py:clip_sdpa", "transformers", options={"mask_means": "add", "mask_shape": "b,1,q,k"}),
    Right("transformers_layers.py:vit_sdpa", "transformers", options={"mask_means": "add"}),
    Right("transformers_layers.py:bart_eager", "transformers", options={"mask_means": "add", "mask_shape": "b,1,q,k"}),
    Right("transformers_layers.py:whisper_sdpa", "transformers", options={"mask_means": "add", "mask_shape": "b,1,q,k"}),
    Right(
        "transformers_layers.py:gpt2_sdpa",
        "transformers",
        options={**CAUSAL, "fused": "q,k,v", "orientation": "in,out", "mask_means": "add"},
    ),
    Right("transformers_layers.py:llama_eager", "transformers", ROPE, CAUSAL),
    Right("transformers_layers.py:llama_sdpa", "transformers", ROPE, CAUSAL),
    Right("transformers_layers.py:qwen3_sdpa", "transformers", {**ROPE, "qk_norm": {"kind": "rms", "eps": 1e-6}}, CAUSAL),
    Right("transformers_layers.py:mistral_sdpa", "transformers", {**ROPE, "window": {"left": 6, "right": 0}}, CAUSAL),
    Right(
        "transformers_layers.py:gemma2_eager",
        "transformers",
        {**ROPE, "window": {"left": 6, "right": 0}, "softcap": 2.0, "scale": 5**-0.5},
        CAUSAL,
    ),
    Right("jax.nn:dot_product_attention", "jax", options={"framework": "jax", "layout": "b,n,h,d", **ATTEND}),
    Right("jax_layers.py:flax_nnx", "flax", options={"framework": "jax", "layout": "b,n,h,d", **ATTEND}),
    Right("jax_layers.py:Flax", "flax", options={"orientation": "in,out"}),
    Right("jax_layers.py:Equinox", "equinox", options={"orientation": "in,out"}),
    Right("jax_layers.py:pallas_attention", "jax", options={"framework": "jax"}),
    Right("mlx_layers.py:mlx_attention", "mlx", options={"framework": "mlx", **ATTEND}),
    Right("mlx.core.fast:scaled_dot_product_attention", "mlx", options={"framework": "mlx", **ATTEND}),
    Right("others.py:tinygrad_attention", "tinygrad"),
    Right("others.py:onnxruntime_attention", "onnxruntime"),
    Right("others.py:onnx_reference_attention", "onnx"),
    Right("others.py:keras_attention", "keras", options={**TORCH, "layout": "b,n,h,d", **ATTEND}),
    Right("others.py:KerasLayer", "keras", options={"orientation": "in,out", **ATTEND, "mask_shape": "b,q,k", "dtype": "float32"}),
    Right("others.py:timm_layer", "timm", options={"fused": "q,k,v", **ATTEND}),
    Right("triton_kernel.py:triton_attention", "triton", options=TORCH),
    Right("einops_layers.py:EinopsAttention", "einops", options={"mask_means": "attend", "mask_shape": "b,k"}),
    Right(
        "einops_layers.py:x_transformers_layer",
        "x_transformers",
        options={**ATTEND, "padding_means": "attend", "arguments": {"attn_mask": "mask", "context_mask": "padding", "mask": "unused"}},
    ),
    Right("d2l_layers.py:MultiHeadAttention", "torch", options={"construct": {"dropout": 0}}),
)

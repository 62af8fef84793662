"""How models name the matrices of an attention layer: each name stands here once, and layouts have those of one row, or all of them."""

from attend.spec_parts import PROJECTIONS

FOUR_MATRICES = {  # layout or model -> names of the matrices of queries, keys, values and of the output
    "llama": "q_proj k_proj v_proj o_proj",
    "bart": "q_proj k_proj v_proj out_proj",
    "bert": "self.query self.key self.value output.dense",
    "vit": "attention.query attention.key attention.value output.dense",
    "distilbert": "q_lin k_lin v_lin out_lin",
    "t5": "q k v o",
    "albert": "query key value dense",
    "ctrl": "Wq Wk Wv dense",
    "deberta-v2": "self.query_proj self.key_proj self.value_proj output.dense",
    "internvl_vision": "q_proj k_proj v_proj projection_layer",
    "modernbert-decoder": "q_proj k_proj v_proj Wo",
    "moshi": "q_proj.linear k_proj.linear v_proj.linear o_proj.linear",
    "mpnet": "attn.q attn.k attn.v attn.o",
    "prophetnet": "query_proj key_proj value_proj out_proj",
    "qwen2_5_omni": "q k v proj",
    "squeezebert": "attention.query attention.key attention.value post_attention.conv1d",
    "wav2vec2-bert": "linear_q linear_k linear_v linear_out",
    "with a prefix": "self.q_proj self.k_proj self.v_proj projection",
}
FUSED = "qkv proj", "query_key_value dense", "qkv_proj o_proj", "Wqkv out_proj", "in_proj out_proj", "c_attn c_proj"
ONE_MATRIX = (  # names of the matrix of queries, keys and values, and of that of the output
    *FUSED,
    "Wqkv Wo",  # ModernBERT
    "self.Wqkv wo",
    "att_proj attn_out",  # Molmo 2
    "attention.qkv output.dense",  # TimeSformer
    "self.in_proj output.dense",  # DeBERTa
    "gqkv_proj o_proj",  # HRM-Text
)


def four_names(paths: str, weight: str = "{}.weight", bias: str = "{}.bias") -> dict[str, str]:
    """Names of four separate projections -> canonical names; without biases if `bias` is ""."""
    named = dict(zip(PROJECTIONS, paths.split(), strict=True))
    names = {weight.format(path): f"{name}.weight" for name, path in named.items()}
    return names | ({bias.format(path): f"{name}.bias" for name, path in named.items()} if bias else {})


def packed_names(**projections: str) -> dict[str, str]:
    """Names of matrices and their biases -> roles, for `packed_names(qkv="c_attn", output="c_proj")`."""
    return {f"{name}.{kind}": f"{projection}.{kind}" for projection, name in projections.items() for kind in ("weight", "bias")}

"""Configs of tiny models beyond the common sizes: fields that a family needs to be made, and variants of some families."""

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 3.0, 5.0, 7.0], "rope_theta": 10000.0}
TWO_KINDS = {"layer_types": ["full_attention", "sliding_attention"] * 3}
MROPE = {"rope_theta": 1e6, "rope_type": "default", "mrope_section": [2, 1, 1]}

SIZES = {  # model_type -> fields without which it cannot be made so small
    "helium": {"hidden_size": 32},
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4},
    "mpnet": {"relative_attention_num_buckets": 32},
    "distilbert": {"hidden_dim": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 3]], "window_size": 5},
    "modernbert": {"local_attention": 6},
    "modernbert-decoder": {"local_attention": 6},
    "big_bird": {"attention_type": "original_full"},
    "longt5": {"num_layers": 2, "num_decoder_layers": 2},
    "ctrl": {"dff": 16},
    "qwen2_vl_text": {"rope_parameters": MROPE},
    "qwen2_5_vl_text": {"rope_parameters": MROPE},
    "step3p5": TWO_KINDS | {"num_sliding_attention_heads": 6},
}
VARIANTS = {  # name -> (model_type, fields)
    "llama_llama3": ("llama", {"rope_parameters": {"rope_theta": 500000.0, **LLAMA3}, "attention_bias": True}),
    "llama_linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "llama_dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}}),
    "llama_yarn": ("llama", {"rope_parameters": YARN}),
    "llama_yarn_mscale": ("llama", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2, "truncate": False, "beta_fast": 4}}),
    "phi3_longrope": ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 16}),
    "qwen2_sliding": ("qwen2", {"use_sliding_window": True, "max_window_layers": 3}),
    "esm_rotary": ("esm", {"position_embedding_type": "rotary"}),
    "cohere_norms": ("cohere", {"use_qk_norm": True}),
    "phi_norms": ("phi", {"qk_layernorm": True}),
    "falcon_several": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "falcon_all": ("falcon", {"multi_query": False}),
    "gpt_bigcode_all": ("gpt_bigcode", {"multi_query": False}),
    "gpt2_scaled": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "laguna_elementwise": ("laguna", {"gating": "per-element", "num_attention_heads_per_layer": [4, 2, 4, 6, 4, 4], **TWO_KINDS}),
    "qwen3_next_biased": ("qwen3_next", {"attention_bias": True}),
    "glm4_moe_norms": ("glm4_moe", {"use_qk_norm": True}),
}

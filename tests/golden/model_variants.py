"""Configs of tiny models beyond the common sizes: fields that a family needs to be made, and variants of some families."""

from attend.checkpoints.families.encoders import WITH_CROSS

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 3.0, 5.0, 7.0], "rope_theta": 10000.0}
LATENT = {"q_lora_rank": 6, "kv_lora_rank": 7, "qk_nope_head_dim": 3, "qk_rope_head_dim": 4, "v_head_dim": 5}
LATENT |= {"num_key_value_heads": 4, "head_dim": 4, "hidden_size": 20}
MAMBA = {"mamba_n_heads": 4, "mamba_d_state": 4, "mamba_n_groups": 1}
TWO_KINDS = {"layer_types": ["full_attention", "sliding_attention"] * 3}
MROPE = {"rope_theta": 1e6, "rope_type": "default", "mrope_section": [2, 1, 1]}

SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 4], "window_size": 4}
SAM = {"image_size": 12, "patch_size": 4, "num_hidden_layers": 2, "window_size": 2}

DEBERTA = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}

SIZES = {  # model_type -> fields without which it cannot be made so small
    "helium": {"hidden_size": 32},
    "deberta": DEBERTA | {"max_relative_positions": 5},
    "deberta-v2": DEBERTA | {"position_buckets": 6, "max_relative_positions": 9, "norm_rel_ebd": "layer_norm", "share_att_key": True},
    "wav2vec2-bert": {
        "feature_projection_input_dim": 80,
        "max_source_positions": 10,
        "left_max_position_embeddings": 4,
        "right_max_position_embeddings": 2,
    },
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
    **{name: {"rope_parameters": MROPE} for name in ("qwen3_vl_text", "qwen3_vl_moe_text")},
    **{
        name: {"rope_parameters": MROPE | {"mrope_section": [1, 1, 1], "partial_rotary_factor": 0.75}}
        for name in ("qwen3_5_text", "qwen3_5_moe_text")
    },
    **dict.fromkeys(("swin", "donut-swin", "swinv2"), SWIN),
    **dict.fromkeys(("sam_vision_model", "sam_hq_vision_model"), SAM | {"global_attn_indexes": [1], "output_channels": 8, "mlp_dim": 16}),
    "mllama_text_model": {"cross_attention_layers": [1, 4], "hidden_size": 32, "rope_parameters": LLAMA3 | {"rope_theta": 500000.0}},
    "blip_2_qformer": {"encoder_hidden_size": 12, "num_hidden_layers": 3},
    "trocr": {"decoder_layers": 2, "cross_attention_hidden_size": 24},
    "vitdet": SAM | {"window_block_indices": [0], "use_relative_position_embeddings": True, "pretrain_image_size": 16},
    "sam3_vit_model": SAM | {"global_attn_indexes": [1], "pretrain_image_size": 16},
    "pixtral": {"hidden_size": 32},
    "qwen2_vl_vision": {"embed_dim": 32, "hidden_size": 16, "num_heads": 4, "depth": 2, "mlp_ratio": 1},
    **{
        name: {"hidden_size": 32, "num_heads": 4, "depth": 2, "out_hidden_size": 16, "deepstack_visual_indexes": [0]}
        for name in ("qwen3_vl_vision", "qwen3_vl_moe_vision", "qwen3_omni_moe_vision_encoder", "cohere_compass_vision")
    },
    **{
        name: {"hidden_size": 32, "num_heads": 4, "depth": 2, "out_hidden_size": 16}
        for name in ("qwen3_5_vision", "qwen3_5_moe_vision", "qwen4_exp_vision", "glm4v_vision", "glm4v_moe_vision", "glm_ocr_vision")
    },
    "glm5_next_vision": {"hidden_size": 32, "num_heads": 4, "depth": 2, "out_hidden_size": 16, "projection_intermediate_size": 16},
    **{
        name: {"hidden_size": 32, "num_heads": 4, "depth": 2, "out_hidden_size": 16, "fullatt_block_indexes": [1]}
        for name in ("qwen2_5_vl_vision", "qwen2_5_omni_vision_encoder", "exaone4_5_vision")
    },
    "video_llama_3_vision": {"hidden_size": 32},
    **{name: {"rope_parameters": MROPE} for name in ("glm4v_text", "glm_image_text", "glm_ocr_text")},
    "glm4v_moe_text": {"rope_parameters": MROPE | {"mrope_section": [1, 1, 1], "partial_rotary_factor": 0.75}},
    "prophetnet": {"num_encoder_layers": 2, "num_decoder_layers": 2, "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4},
    **{
        name: {"speech_encoder_layers": 1, "t2u_encoder_layers": 1, "t2u_decoder_layers": 1} for name in ("seamless_m4t", "seamless_m4t_v2")
    },
    "llama4_text": {"floor_scale": 3, "attn_scale": 0.5},
    "ministral3": {"rope_parameters": YARN | {"original_max_position_embeddings": 4, "llama_4_scaling_beta": 0.5}},
    "mimo_v2_flash": {"v_head_dim": 6},
    "longcat_flash": LATENT
    | {"num_layers": 2, "qk_head_dim": 7, "ffn_hidden_size": 16, "expert_ffn_hidden_size": 8, "zero_expert_num": 2, "moe_topk": 2},
    "beam": TWO_KINDS | {"rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": None}},
    "luke": {"use_entity_aware_attention": False, "entity_vocab_size": 8, "entity_emb_size": 12},
    "squeezebert": {"embedding_size": 32},
    "timesformer": {"num_frames": 3},
    "esmc": {"num_key_value_heads": 4, "hidden_size": 32},
    "fsmt": {"use_cache": False},  # with a cache, its decoder sees the future in a first call
    "xmod": {"default_language": "en_XX"},
    "mobilebert": {"intra_bottleneck_size": 16},
    "bamba": MAMBA | {"attn_layer_indices": [1, 4]},
    "granitemoehybrid": MAMBA | {"layer_types": ["linear_attention", "full_attention"] * 3},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 32, "mamba_d_head": 8, "key_multiplier": 0.7},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 3},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 3},
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 1, "layers_block_type": ["linear_attention", "full_attention"]},
    "moonshine": {"hidden_size": 80}
    | {f"{side}_num_{name}": 4 for side in ("encoder", "decoder") for name in ("attention_heads", "key_value_heads", "hidden_layers")},
    "videomae": {"num_frames": 4, "decoder_num_attention_heads": 4, "decoder_num_hidden_layers": 1},
    "recurrent_gemma": {"attention_window_size": 5},
    "yolos": {"image_size": [8, 8], "num_detection_tokens": 2},
    "sew": {"conv_dim": [8] * 13},
    "vivit": {"tubelet_size": [2, 4, 4], "num_frames": 4},
    "whisper": {"num_mel_bins": 8, "max_source_positions": 16},
    "speech_to_text": {"input_feat_per_channel": 8, "conv_channels": 8, "max_source_positions": 32},
    "audio-spectrogram-transformer": {"max_length": 16, "num_mel_bins": 8, "frequency_stride": 4, "time_stride": 4},
    "step3p5": TWO_KINDS | {"num_sliding_attention_heads": 6},
    **dict.fromkeys(("deepseek_v3", "glm4_moe_lite", "youtu", "axk1", "minicpm3"), LATENT),
    "mistral4": LATENT
    | {
        "head_dim": 7,
        "rope_parameters": YARN | {"original_max_position_embeddings": 4, "mscale_all_dim": 1.2, "llama_4_scaling_beta": 0.5},
    },
    "kimi_linear": LATENT | {"mlp_layer_types": ["dense"] * 6},
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa", "hy_v4"), LATENT | {"index_topk": 4, "index_head_dim": 6, "index_n_heads": 8}),
    "deepseek_v2": LATENT | {"kv_lora_rank": 8, "qk_nope_head_dim": 6},
}
VARIANTS = {  # name -> (model_type, fields)
    "deberta_v2_own": ("deberta-v2", {"share_att_key": False, "norm_rel_ebd": "none", "position_buckets": -1, "pos_att_type": "p2c|c2p"}),
    "deberta_v2_c2p": ("deberta-v2", {"share_att_key": False, "pos_att_type": ["c2p"]}),
    "deberta_c2p": ("deberta", {"pos_att_type": ["c2p"], "max_relative_positions": -1}),
    "wav2vec2_conformer_plain": ("wav2vec2-conformer", {"position_embeddings_type": None}),
    "wav2vec2_bert_relative": ("wav2vec2-bert", {"position_embeddings_type": "relative"}),
    "parakeet_ctc": ("parakeet_ctc", {}),
    "xlnet_clamped": ("xlnet", {"clamp_len": 3}),
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
    "falcon_one_norm": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}),
    "internlm3_biased": ("internlm3", {"attention_bias": True, "mlp_bias": True}),
    "minimax_m2_partial": ("minimax_m2", {"rotary_dim": 4}),
    "lfm3_eps": ("lfm3", {"norm_eps": 0.1}),
    "falcon_all": ("falcon", {"multi_query": False}),
    "gpt_bigcode_all": ("gpt_bigcode", {"multi_query": False}),
    "gpt2_scaled": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "deepseek_v2_one_step": ("deepseek_v2", {"q_lora_rank": None}),
    "diffllama_biased": ("diffllama", {"attention_bias": True, "num_attention_heads": 8, "num_key_value_heads": 4}),
    "deepseek_v32_yarn": ("deepseek_v32", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}, "attention_bias": True}),
    "glm_moe_dsa_shared": ("glm_moe_dsa", {"indexer_types": ["full", "full", "shared"] * 2}),
    "deepseek_v3_yarn": (
        "deepseek_v3",
        LATENT | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}, "rope_interleave": False, "attention_bias": True},
    ),
    "molmo2_text_olmo": ("molmo2_text", {"qk_norm_type": "olmo", "attention_bias": True}),
    "granitemoehybrid_rope": ("granitemoehybrid", {"position_embedding_type": "rope"}),
    "clip": ("clip", {}),  # a section for text and one for images
    "siglip": ("siglip", {}),
    "vit_unbiased": ("vit", {"qkv_bias": False}),
    "laguna_elementwise": ("laguna", {"gating": "per-element", "num_attention_heads_per_layer": [4, 2, 4, 6, 4, 4], **TWO_KINDS}),
    "qwen3_next_biased": ("qwen3_next", {"attention_bias": True}),
    **{f"{name}_cross": (name, {"is_decoder": True, "add_cross_attention": True}) for name in WITH_CROSS.split()},
    "gpt2_cross": ("gpt2", {"add_cross_attention": True}),
    "beit_tables": ("beit", {"use_relative_position_bias": True}),
    "data2vec-vision_tables": ("data2vec-vision", {"use_relative_position_bias": True}),
    "glm4_moe_norms": ("glm4_moe", {"use_qk_norm": True}),
}

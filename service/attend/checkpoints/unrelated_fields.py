"""Fields of a config.json that no attention layer depends on: they are about other layers, training, generation, tokens or the file.

`is_unrelated(name, value)` decides for all families. A field that only one family has, and whose name would mean attention elsewhere, is in
that family's row (`AttentionRow.irrelevant`). Every other field that a family does not read is refused, since a field that a loader ignores
is the usual cause of wrong results.

The names are those of transformers 5.23.0's config classes, of which `tests/golden/perturb_models.py` shows that a change leaves the layers
as they are, of `PretrainedConfig` of transformers 4, and of files on hubs that were written by training and quantisation tools.
"""

import re

SUBJECTS = re.compile(  # words of a name, between underscores or at its ends
    r"(^|_)(vocab|moe|mtp|nextn|experts?|router|routed|routing|mlp|ffn|loss|losses|initializer|classifier|pooler|pooling|summary|labels?|"
    r"adapter|adaptor|backbone|auxiliary|vocoder|postnet|predictor|codevector|resblock|upsample|energy|pitch|duration|tdnn|xvector|"
    r"quantization|unsloth|liger|deepspeed|megatron)(_|$)|"
    r"dropout|pdrop|layerdrop|drop_path|_token(_ids?|_index|_idx)?$|_(act|act_fn|activation|activation_function)$|_config$"
)
ABOUT_ATTENTION = re.compile(  # words that a name must not contain for its subject to count
    r"head|attn|attention|quer|(^|_)q_?k|(^|_)q?kv|keys?(_|$)|rope|rotary|alibi|window|chunk|sink|causal|bidirectional|mask|softmax|gat(e|ing)(_|$)|"
    r"softcap|soft_cap|relative|score|mup"
)
NAMES: dict[str, str] = {  # subject -> its fields
    "the file": """
        architectures auto_map custom_pipelines model_type transformers_version transformers.js_config transformers_weights _name_or_path
        name_or_path _commit_hash _from_model_config _diffusers_version _class_name dtype torch_dtype torchscript use_bfloat16 is_quantized
        quantization compression_config model_name model_version author license tags task task_specific_params problem_type finetuning_task
        id2label label2id num_labels _num_labels return_dict output_hidden_states output_attentions output_past use_cache use_return_dict
        tie_word_embeddings tie_encoder_decoder tf_legacy_loss gradient_checkpointing use_gradient_checkpointing pretraining_tp
        tensor_parallel tp_plan seed format language languages sub_configs keys_to_ignore_at_inference tokenizer_class tokenizer_name
        tokenizer_file verbose is_llama_config tie_weights_ processor_class prefix chat_template is_encoder_decoder is_decoder is_encoder
        model_parallel
    """,
    "how attention is computed, not what": """
        _attn_implementation _attn_implementation_autoset _attn_implementation_internal _flash_attn_2_enabled attn_implementation
        use_flash_attn use_flash_attention use_flash_attention_2 flash_attention use_memory_efficient_attention deterministic_flash_attn
        use_sdpa use_cache_quantization use_cache_kernel softmax_in_fp32 attention_softmax_in_fp32 scale_attention_softmax_in_fp32
        use_mambapy use_mamba_kernels use_associative_scan slow_but_exact attention_dropout attention_dropout_prob
        attention_probs_dropout_prob attn_dropout attn_dropout_prob attn_pdrop attn_dropout_p attn_drop_rate attention_dropout_rate
        decoder_attention_dropout_rate encoder_attention_dropout_rate attn_mask_dropout mask_dropout
    """,
    "generation": """
        do_sample early_stopping max_length min_length max_new_tokens num_beams num_beam_groups diversity_penalty temperature top_k top_p
        typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences
        output_scores return_dict_in_generate remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
        forced_decoder_ids forced_bos_token_id forced_eos_token_id max_initial_timestamp_index median_filter_width num_logits_to_keep
        use_logits_to_keep chunk_length_s inference_runner cache_implementation max_batch_size pad_key_length pre_allocate_kv_cache
        validate_runner_input
    """,
    "tokens and embeddings": """
        token_dropout force_bos_token_to_be_generated extra_pos_embeddings normalize_embedding directionality initial_context_length
        unk_index mask_index mask_token_id mask_ratio trigram_input lang_id langs n_langs lang_embed_dim use_lang_emb asm embedding_size
        embedding_dim input_embedding_size output_embedding_size entity_emb_size embedding_multiplier embedding_fraction scale_embedding
        scale_embeddings rescale_embeddings normalize_embeddings word_embed_proj_dim emb_layer_norm_before tag_pad_id subs_pad_id
        xpath_unit_hidden_size max_xpath_tag_unit_embeddings max_xpath_subs_unit_embeddings max_depth max_num_columns max_num_rows
        max_2d_position_embeddings max_position_embeddings max_encoder_position_embeddings max_decoder_position_embeddings
        max_source_positions max_target_positions n_positions n_ctx max_seq_len max_seq_length max_sequence_length seq_length seq_len
        model_max_length static_position_embeddings sinusoidal_embeddings sinusoidal_pos_embds use_mid_position_embeddings
        use_absolute_embeddings use_absolute_position_embeddings reset_position_index_per_cell shape_embed_dim pronunciation_embed_dim
        enable_shape enable_pronunciation concat_input use_task_id speaker_embed_dim spkr_embed_dim unit_embed_dim dropout_positions
        hidden_size_per_layer_input share_encoder_decoder_embeddings default_language is_folding_model downsampling_rate
        upsampling_kernel_size
    """,
    "blocks around the layer": """
        hidden_act hidden_activation activation activation_function afn gelu_activation ff_activation intermediate_size
        intermediate_multiple_size intermediate_groups shared_intermediate_size dense_intermediate_size prefix_dense_intermediate_size
        n_inner d_ff dff d_inner ff_factor feed_forward_proj dense_act_fn feed_forward_residual_weights chunk_size_feed_forward
        block_ffn_dim_multiplier block_auto_adjust_ff_dim block_multiple_of num_feedforward_networks true_hidden_size
        activation_sparsity_pattern laurel_rank altup_active_idx altup_coef_clip altup_correct_scale altup_num_inputs residual_multiplier
        residual_in_fp32 rescale_prenorm_residual do_layer_norm_before apply_residual_connection_post_layernorm use_parallel_residual
        parallel_attn pre_norm norm_type path_norm pooler_num_attention_heads pooler_size_per_head add_final_layer_norm normalize_before
        norm_bias use_post_norm decoder_normalize_before encoder_normalize_before layer_norm_elementwise_affine layer_norm_before
        layerscale_value layer_scale_init_value use_gated_mlp decoder_intermediate_size decoder_hidden_act encoder_hidden_act
        expansion_ratio _remove_final_layer_norm _sliding_window_pattern add_cross_attention cross_attention_hidden_size num_hidden_groups
        inner_group_num hidden_size_per_layer swiglu_alpha swiglu_limit swiglu_limits swiglu_limits_shared conv1d_width lru_width
        num_ln_in_parallel_attn
    """,
    "experts": """
        first_k_dense_replace num_dense_layers n_group n_groups topk_group topk_method top_k_experts norm_topk_prob route_scale scoring_func
        seq_aux aux_loss_alpha ep_size moe_layer_freq num_local_experts expert_capacity second_expert_policy decoder_sparse_step
        encoder_sparse_step num_sparse_decoder_layers num_sparse_encoder_layers batch_prioritized_routing
        normalize_router_prob_before_dropping input_jitter_noise enable_moe_block zero_expert_num moe_router_logit_softcapping
    """,
    "logits and training": """
        final_logit_softcapping add_bias_logits logits_scaling lm_head_bias lm_head_multiplier prediction_head_size sparse_prediction
        sparse_pred_ignore_index init_std init_device initializer_cutoff_factor embed_init_std use_mems_eval use_mems_train
        apply_spec_augment mask_feature_length mask_feature_min_masks mask_feature_prob mask_time_length mask_time_min_masks mask_time_prob
        ctc_zero_infinity num_ctc_classes num_negatives num_clusters contrastive_logits_temperature replace_prob start_n_top end_n_top
        use_weighted_layer_sum use_mean_pooling eos_coefficient bbox_cost class_cost giou_cost huber_loss_delta dim_model_base
        z_loss_coefficient use_masking use_weighted_masking is_hybrid is_native
    """,
    "answers about tables": """
        aggregation_labels aggregation_temperature allow_empty_column_selection average_approximation_function average_logits_per_cell
        cell_selection_preference init_cell_selection_weights_to_zero no_aggregation_label_index num_aggregation_labels select_one_column
        use_answer_as_supervision use_gumbel_for_aggregation use_gumbel_for_cells use_normalized_answer_loss
    """,
    "images and sounds": """
        image_size patch_size patch_dim num_channels in_channels in_chans input_channels num_frames tubelet_size temporal_patch_size
        video_patch_dim video_temporal_patch_size spatial_merge_size spatial_patch_size pretrain_image_size encoder_stride max_img_size
        max_image_length num_images num_image_with_embedding visual_embedding_dim special_visual_initialize tokens_per_second projection_dim
        projection_size projection_intermediate_size out_hidden_size output_hidden_size output_channels neck_hidden_sizes neck_ignore_stages
        fusion_hidden_size reassemble_factors readout_type reshape_hidden_states residual_block_indices stage_names out_features out_indices
        add_fpn add_projection use_batch_norm_in_fusion_residual use_bias_in_fusion_residual num_detection_tokens num_register_tokens
        num_registers num_cls_tokens n_cls_tokens deepstack_visual_indexes bypass_transformer num_mel_bins input_feat_per_channel
        feature_projection_input_dim frequency_stride time_stride num_feat_extract_layers feat_extract_activation audio_stream_bos_id
        audio_stream_eos_id sampling_rate squeeze_factor subsampling_factor reduction_factor repmixer_kernel_size leaky_relu_slope
        num_speakers num_languages speaking_speed num_codebooks codebook_size num_codevectors_per_group logit_scale_init_value
    """,
    "layers of other kinds": """
        expand time_step_floor time_step_limit time_step_max time_step_min positionwise_conv_kernel_size
    """,
}
OFF = """use_mrope attention_bias qkv_bias use_qk_norm use_qkv_bias qk_layernorm use_sliding_window alibi prefix_lm use_xpos
use_dynamic_ntk use_logn_attn"""  # features that a layer does not have if the field is false
EXACT = frozenset(name for names in NAMES.values() for name in names.split())


def is_unrelated(name: str, value: object) -> bool:
    """Whether no attention layer depends on this field, which no family reads."""
    return (
        value is None
        or value == {}
        or (value is False and name in OFF.split())
        or name in EXACT
        or (SUBJECTS.search(name) is not None and ABOUT_ATTENTION.search(name) is None)
    )

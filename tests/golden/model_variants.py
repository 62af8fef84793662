"""Configs of model families whose fields differ from the defaults of transformers: name -> (model_type, fields)."""

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}

VARIANTS = {
    "llama_llama3": ("llama", {"rope_parameters": {"rope_theta": 500000.0, **LLAMA3}, "attention_bias": True}),
    "llama_linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "qwen2_sliding": ("qwen2", {"use_sliding_window": True, "max_window_layers": 3}),
}

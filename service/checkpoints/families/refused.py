"""Model types that no row of the table can describe, each with what the layer would need."""

REASONS = {  # what the layer cannot compute -> the model types that need it
    "keys selected by an indexer, and queries from latent vectors with and without their norm": "axk2",
    "rotated values, an output projection in groups, and keys compressed from chunks": "deepseek_v4",
    "code that transformers does not have": "kimi_k2",
    "a norm of head outputs": "muse_spark_text bitnet",
    "scores between segments, or from positions in pooled sequences": "funnel",
    "masks of chunks that see the chunks before them": "nemotron_asr_streaming_encoder",
    "values from relative positions": "vits",
    "relative biases with a gate, or between segments": "wavlm cpmant",
    "positions of a class token that are learnt": "mlcd mlcd_vision_model",
    "biases on keys from their values": "doge",
    "experts among its projections": "jetmoe",
    "attention to blocks, buckets or global tokens": "longformer reformer yoso mra nystromformer",
    "layers without a softmax": "mamba mamba2 falcon_mamba rwkv xlstm fnet",
    "convolutions in its attention": "convbert zaya inkling_text inkling2_text",
}
REFUSED: dict[str, str] = {name: reason for reason, names in REASONS.items() for name in names.split()}

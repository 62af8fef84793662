"""The table of model families: `model_type` -> part of the model -> an `AttentionRow`, which says how a config becomes a LayerSpec.

    decoders.py        text models that generate, such as Llama and GPT-2, also with layers of other kinds, such as Mamba's
    encoders.py        text models that read in both directions, such as BERT, text towers; with a decoder too, such as BART and T5
    vision_audio.py    models and towers of images and sounds
    examples.py        a small layer of each family

A new family is one line in one of these, between families that resemble it; families with equal lines share one. It says only what
differs from Llama (`decoder`), BERT (`encoder`), ViT (`vision`) or Wav2Vec2 (`audio`): in fields of `AttentionRow` (row.py) if that is a
name in the config or in the checkpoint, in `Rotary` (../rope.py) if it is about RoPE, otherwise in traits (traits.py). Then
`python tests/golden/generate_models.py NAME` compares the row with the family's own code, and writes its case.
"""

from attend.checkpoints.families.decoders import DECODERS, HYBRIDS
from attend.checkpoints.families.encoders import ENCODER_DECODERS, ENCODERS
from attend.checkpoints.families.row import AttentionRow, Family, fields_of, number_of_layers, path_numbers
from attend.checkpoints.families.vision_audio import AUDIO, VISION

__all__ = [
    "COMPOSITES",
    "FAMILIES",
    "PARTS",
    "REASONS",
    "REFUSED",
    "AttentionRow",
    "Family",
    "fields_of",
    "number_of_layers",
    "path_numbers",
]

TABLES = DECODERS | HYBRIDS | ENCODERS | ENCODER_DECODERS | VISION | AUDIO
FAMILIES: dict[str, Family] = {name: family for names, family in TABLES.items() for name in names.split()}
PARTS = tuple(dict.fromkeys(part for family in FAMILIES.values() for part in family))
COMPOSITES = """aria audioflamingo3 clip embedding_gemma2 exaone4_5 fuyu gemma3 gemma4 gemma4_unified glm46v glm4v glm4v_moe glm_ocr
glmga got_ocr2 granite_speech granite_speech_plus hyperclovax_vision_v2 idefics3 internvl lighton_ocr llama4 llava
llava_next llava_onevision minimax_m3_vl mistral3 musicflamingo ovis2 parakeet_ctc parakeet_rnnt parakeet_tdt
qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_asr qwen3_vl siglip smolvlm step3p7 vipllava
mllama vision-encoder-decoder"""  # model types whose config has a section for each of their families, such as text_config
REASONS = {  # what the layer cannot compute -> the model types that need it, which are refused
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

"""The table of model families: `model_type` -> part of the model -> an `AttentionRow`, which says how a config becomes a LayerSpec.

    decoders.py            text models that generate, such as Llama and GPT-2
    hybrids.py             those which have other kinds of layers too, such as Mamba's
    encoders.py            text models that read in both directions, such as BERT, and text towers
    encoder_decoders.py    BART, T5
    vision.py, audio.py    models and towers of images and sounds
    refused.py             model types that need an operation that the layer does not have

A new family is one line in one of these, between families that resemble it; families with equal lines share one. It says only what
differs from Llama (`decoder`), BERT (`encoder`), ViT (`vision`) or Wav2Vec2 (`audio`): in fields of `AttentionRow` (row.py) if that is a
name in the config or in the checkpoint, in `Rotary` (../rope.py) if it is about RoPE, otherwise in traits (traits.py). Then
`python tests/golden/generate_models.py NAME` compares the row with the family's own code, and writes its case.
"""

from service.checkpoints.families.audio import AUDIO
from service.checkpoints.families.decoders import DECODERS
from service.checkpoints.families.encoder_decoders import ENCODER_DECODERS
from service.checkpoints.families.encoders import ENCODERS
from service.checkpoints.families.hybrids import HYBRIDS
from service.checkpoints.families.refused import REASONS, REFUSED
from service.checkpoints.families.row import AttentionRow, Family, fields_of, number_of_layers, place_of
from service.checkpoints.families.vision import VISION

__all__ = ["COMPOSITES", "FAMILIES", "PARTS", "REASONS", "REFUSED", "AttentionRow", "Family", "fields_of", "number_of_layers", "place_of"]

TABLES = DECODERS | HYBRIDS | ENCODERS | ENCODER_DECODERS | VISION | AUDIO
FAMILIES: dict[str, Family] = {name: family for names, family in TABLES.items() for name in names.split()}
PARTS = tuple(dict.fromkeys(part for family in FAMILIES.values() for part in family))
COMPOSITES = """aria audioflamingo3 clip embedding_gemma2 exaone4_5 fuyu gemma3 gemma4 gemma4_unified glm46v glm4v glm4v_moe glm_ocr
glmga got_ocr2 granite_speech granite_speech_plus hyperclovax_vision_v2 idefics3 internvl lighton_ocr llama4 llava
llava_next llava_onevision minimax_m3_vl mistral3 musicflamingo ovis2 parakeet_ctc parakeet_rnnt parakeet_tdt
qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_asr qwen3_vl siglip smolvlm step3p7 vipllava
mllama vision-encoder-decoder"""  # model types whose config has a section for each of their families, such as text_config

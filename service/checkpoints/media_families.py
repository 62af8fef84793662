"""Families of encoders of images and sounds, beside those of text in `families.py`.

Their softmax attention is plain. Positions in two dimensions, tables of windows and relative positions by content are refused.
"""

from dataclasses import replace

from service.checkpoints.family import Attention, Family
from service.checkpoints.rope import Rotary
from service.checkpoints.traits import Trait, biased, biased_but, normed, only, window_everywhere

# Patterns of fields without effect in the layers.
SIZES = (
    "^(image|patch)_|projection|mask_token|layernorm|layer_?scale|^(vision_)?use_head$|^decoder_|norm_pix|^norm_(mean|std)$|_scales$|"
    "position_embeddings$|auxiliary_head|^head_in"
)
SOUNDS = "conv|feat_|codevector|^mask_|adapter|temperature|^add_|negatives|stable_layer_norm"

VIT = Attention(path="layer.{n}.attention", kv_heads=(), causal=False, bias=biased_but("qkv_bias", "o", default=True), irrelevant=SIZES)
TIMM = replace(VIT, path="blocks.{n}.attn", layout="stacked")
CLIP = replace(VIT, path="layers.{n}.self_attn", bias=biased(None))
INTERN = replace(VIT, bias=biased_but("attention_bias", "o"))
WAV2VEC2 = replace(CLIP, path="encoder.layers.{n}.attention", irrelevant=SOUNDS)
LASR = Attention(rotary=Rotary(), causal=False, bias=biased("attention_bias"), irrelevant=f"{SOUNDS}|batch_norm|residual")
WITHOUT_KEY_BIAS = biased(None, "qvo")
WHISPER = replace(CLIP, bias=WITHOUT_KEY_BIAS, irrelevant=SOUNDS)


def vision(attention: Attention, *traits: Trait) -> Family:
    return {"vision": replace(attention, traits=traits)}


def audio(attention: Attention, *traits: Trait) -> Family:
    return {"audio": replace(attention, traits=traits)}


WITHOUT_TABLES = (only("use_relative_position_bias", False), only("use_shared_relative_position_bias", False))
FULL_NORM = normed("use_qk_norm", over="all", weights="own")

VISION: dict[str, Family] = {
    **dict.fromkeys(("vit", "deit", "dinov2", "dinov2_with_registers", "ijepa", "vit_mae", "vit_msn", "yolos", "vivit"), vision(VIT)),
    **dict.fromkeys(("pixio", "dpt", "vilt"), vision(VIT)),
    **dict.fromkeys(("beit", "data2vec-vision"), vision(replace(VIT, bias=WITHOUT_KEY_BIAS), *WITHOUT_TABLES)),
    "videomae": vision(replace(VIT, bias=biased_but("qv_bias", "o", never="k", default=True))),
    **dict.fromkeys(("tipsv2_vision_model", "radio"), vision(TIMM)),
    **dict.fromkeys(("clip_vision_model", "siglip_vision_model", "chinese_clip_vision_model"), vision(CLIP)),
    **dict.fromkeys(("idefics3_vision", "smolvlm_vision"), vision(CLIP)),
    "aimv2_vision_model": vision(replace(VIT, path="layers.{n}.attention", bias=biased("qkv_bias"))),
    "internvl_vision": vision(INTERN, FULL_NORM),
    "qianfan_ocr_vision": vision(replace(INTERN, path="layers.{n}.attention"), FULL_NORM),
}
AUDIO: dict[str, Family] = {
    "audio-spectrogram-transformer": audio(VIT),
    **dict.fromkeys(("wav2vec2", "hubert", "unispeech", "unispeech-sat", "data2vec-audio", "sew"), audio(WAV2VEC2)),
    **dict.fromkeys(("voxtral_encoder", "moss_transcribe_diarize_audio"), audio(WHISPER)),
    "qwen2_audio_encoder": audio(replace(WHISPER, heads=("encoder_attention_heads",), layers=("encoder_layers",))),
    "voxtral_realtime_encoder": audio(replace(WHISPER, causal=True, rotary=Rotary()), window_everywhere),
    "lasr_encoder": audio(LASR),
    "glmasr_encoder": audio(replace(WHISPER, kv_heads=("num_key_value_heads",), rotary=Rotary(partial=0.5))),
}

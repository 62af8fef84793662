"""Families of encoders of images and sounds, beside those of text in `families.py`.

Their softmax attention is plain. Positions in two dimensions, tables of windows and convolutions are refused.
"""

from dataclasses import replace

from service.checkpoints.family import Attention, Family
from service.checkpoints.traits import Trait, biased, biased_but

# Patterns of fields without effect in the layers.
SIZES = "^(image|patch)_|projection|mask_token|layernorm|layer_?scale|^vision_use_head$|^decoder_|norm_pix|^use_mid_position"
VIT = Attention(path="layer.{n}.attention", kv_heads=(), causal=False, bias=biased_but("qkv_bias", "o", default=True), irrelevant=SIZES)
CLIP = replace(VIT, path="layers.{n}.self_attn", bias=biased(None))
WAV2VEC2 = replace(
    CLIP,
    path="encoder.layers.{n}.attention",
    irrelevant="conv|feat_|codevector|^mask_|adapter|temperature|^add_|negatives|stable_layer_norm|pos_conv",
)


def vision(attention: Attention, *traits: Trait) -> Family:
    return {"vision": replace(attention, traits=traits)}


def audio(attention: Attention, *traits: Trait) -> Family:
    return {"audio": replace(attention, traits=traits)}


VISION: dict[str, Family] = {
    **dict.fromkeys(("vit", "deit", "dinov2", "dinov2_with_registers", "ijepa", "vit_mae", "vit_msn", "yolos", "vivit"), vision(VIT)),
    **dict.fromkeys(("clip_vision_model", "siglip_vision_model", "chinese_clip_vision_model"), vision(CLIP)),
}
AUDIO: dict[str, Family] = {
    "audio-spectrogram-transformer": audio(VIT),
    **dict.fromkeys(("wav2vec2", "hubert", "unispeech", "unispeech-sat", "data2vec-audio", "sew"), audio(WAV2VEC2)),
}

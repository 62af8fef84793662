"""Rows of encoders of images. Positions in two dimensions, tables of windows and relative positions by content are refused."""

from dataclasses import replace

from service.checkpoints.families.row import Attention, Family
from service.checkpoints.families.traits import ALL_BIASED, WITHOUT_KEY_BIAS, Trait, biased, biased_but, normed, only

SIZES = (  # fields without effect in the layers
    "^(image|patch)_|projection|mask_token|layernorm|layer_?scale|^(vision_)?use_head$|^decoder_|norm_pix|^norm_(mean|std)$|_scales$|"
    "position_embeddings$|auxiliary_head|^head_in"
)
VIT = Attention(path="layer.{n}.attention", kv_heads=(), causal=False, bias=biased_but("qkv_bias", "o", default=True), irrelevant=SIZES)
TIMM = replace(VIT, path="blocks.{n}.attn", layout="stacked")
CLIP = replace(VIT, path="layers.{n}.self_attn", bias=ALL_BIASED)
INTERN = replace(VIT, bias=biased_but("attention_bias", "o"))
WITHOUT_TABLES = (only("use_relative_position_bias", False), only("use_shared_relative_position_bias", False))
FULL_NORM = normed("use_qk_norm", over="all", weights="own")


def vision(attention: Attention, *traits: Trait) -> Family:
    return {"vision": replace(attention, traits=traits)}


VISION: dict[str, Family] = {
    **dict.fromkeys(("vit", "deit", "dinov2", "dinov2_with_registers", "ijepa", "vit_mae", "vit_msn", "yolos", "vivit"), vision(VIT)),
    **dict.fromkeys(("pixio", "dpt", "vilt"), vision(VIT)),
    **dict.fromkeys(("beit", "data2vec-vision"), vision(replace(VIT, bias=WITHOUT_KEY_BIAS), *WITHOUT_TABLES)),
    "videomae": vision(replace(VIT, bias=biased_but("qv_bias", "o", never="k", default=True))),
    **dict.fromkeys(("tipsv2_vision_model", "radio"), vision(TIMM)),
    **dict.fromkeys(("clip_vision_model", "siglip_vision_model", "chinese_clip_vision_model"), vision(CLIP)),
    **dict.fromkeys(("idefics3_vision", "smolvlm_vision"), vision(CLIP)),
    "timesformer": {
        part: replace(VIT, path=f"encoder.layer.{{n}}.{name}", layout="stacked", irrelevant=f"{SIZES}|^attention_type$")
        for part, name in (("time", "temporal_attention"), ("space", "attention"))
    },
    "aimv2_vision_model": vision(replace(VIT, path="layers.{n}.attention", bias=biased("qkv_bias"))),
    "internvl_vision": vision(INTERN, FULL_NORM),
    "qianfan_ocr_vision": vision(replace(INTERN, path="layers.{n}.attention"), FULL_NORM),
}

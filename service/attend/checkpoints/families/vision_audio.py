"""Rows of encoders of images and of sounds."""

import math
from dataclasses import replace
from functools import partial

from attend.checkpoints.config import Config
from attend.checkpoints.families.row import AttentionRow, Family, family
from attend.checkpoints.families.traits import (
    ALL_BIASED,
    NO_BIASES,
    STAGE,
    WITHOUT_KEY_BIAS,
    biased,
    constant,
    normed,
    require_present,
    window_everywhere,
    with_options,
)
from attend.checkpoints.layout import Fields
from attend.checkpoints.rope import Rotary
from attend.spec_parts import PROJECTIONS

IMAGE_FIELDS = """decoder_* apply_layernorm norm_mean norm_std norm_pix_loss pool_scales use_auxiliary_head head_in_index use_head
vision_use_head use_mask_token"""  # fields without effect in the layers
VIT = AttentionRow(
    path="layer.{n}.attention", kv_heads=(), causal=False, bias=biased("qkv_bias", "qkv", always="o", default=True), irrelevant=IMAGE_FIELDS
)
TIMM = replace(VIT, path="blocks.{n}.attn", layout="stacked")
CLIP = replace(VIT, path="layers.{n}.self_attn", bias=ALL_BIASED)
INTERN = replace(VIT, bias=biased("attention_bias", "qkv", always="o"))
IMAGE = Rotary(theta=10000.0, image="blocks")
SAM = replace(VIT, path="layers.{n}.attn", layout="stacked", irrelevant=f"{IMAGE_FIELDS} scale num_pos_feats use_abs_pos")
SWIN = replace(
    VIT,
    path="encoder.layers.{stage}.blocks.{block}.attention",
    heads=("num_heads",),
    stages="depths",
    irrelevant="num_layers layer_norm_eps",
)
QWEN = replace(
    TIMM,
    heads=("num_heads",),
    layers=("depth",),
    bias=ALL_BIASED,
    rotary=IMAGE,
    irrelevant=f"{IMAGE_FIELDS} window_size fullatt_block_indexes num_position_embeddings",
)
FULL_NORM = normed("use_qk_norm", over="all", weights="own")
MOST_TOKENS = 1 << 16  # of one side of a grid


def _patches(config: Config) -> tuple[int, int]:
    """Rows and columns of patches of an image of the config's size."""
    height, width = (_side(config, "image_size", axis) // _side(config, "patch_size", axis) for axis in (0, 1))
    return height, width


def _side(config: Config, field: str, axis: int) -> int:
    """The height (axis 0) or width (axis 1) in a field that has one number for both, or a list of two."""
    size = config.get(field)
    side = size[axis] if isinstance(size, list) and len(size) == 2 else size
    return Config({field: side}, config.at).count(field, most=MOST_TOKENS)


def _grid(height: int, width: int, **more: object) -> Fields:
    return {"grid_bias": {"height": height, "width": width, "kind": "table", "class_token": False, **more}}


def table_of_image(config: Config) -> Fields:
    """BEiT: a table in each layer, if the config says so. One that layers share, and one that is resampled, are refused."""
    config.expect("use_shared_relative_position_bias", False)
    if not config.flag("use_relative_position_bias", default=False):
        return {}
    if len(set(sides := _patches(config))) > 1:
        raise config.refusal("image_size", "a square, since the tables of others are resampled", config.get("image_size"))
    return _grid(*sides, class_token=True)


def table_of_window(config: Config) -> Fields:
    """Swin: a table of the window, which is smaller than its image."""
    return _grid(*[config.count("window_size", most=MOST_TOKENS)] * 2)


def cosine_of_window(config: Config) -> Fields:
    """Swin v2: cosine scores with a factor for each head, and a window that is at most as large as the image of its stage."""
    if any(pretrained := config.get("pretrained_window_sizes", default=[])):
        raise config.refusal("pretrained_window_sizes", "zeros, since others change the scale of distances", pretrained)
    sides = (min(config.count("window_size"), side >> config.get(STAGE)) for side in _patches(config))
    return {**_grid(*sides), "qk_norm": {"kind": "rms", "weights": "own", "eps": 1e-24}, "scale": 1.0}


@with_options
def vectors_of_window(config: Config, flag: str, window_layers: str = "", image_layers: str = "") -> Fields:
    """SAM and ViTDet: vectors for each row and column of a window, or of the whole image in some layers."""
    config.ignore("window_size", window_layers or image_layers)
    if not config.flag(flag):
        return {}
    listed, side = config.layer in config.get(window_layers or image_layers, default=[]), config.get("window_size")
    sides = _patches(config) if not side or listed == bool(image_layers) else [config.count("window_size", most=MOST_TOKENS)] * 2
    return _grid(*sides, kind="decomposed")


def biased_each(config: Config) -> Fields:
    """DINOv3: a flag for the bias of each projection."""
    flags = zip(PROJECTIONS, ("query_bias", "key_bias", "value_bias", "proj_bias"), (True, False, True, True), strict=True)
    return {"bias": {name: config.flag(flag, default=default) for name, flag, default in flags}}


LIKE_QWEN = """qwen2_5_vl_vision qwen3_vl_vision qwen3_vl_moe_vision qwen3_5_vision qwen3_5_moe_vision qwen4_exp_vision
qwen3_omni_moe_vision_encoder cohere_compass_vision"""


vision = partial(family, "vision")

VISION: dict[str, Family] = {
    "vit deit dinov2 dinov2_with_registers ijepa vit_mae vit_msn yolos vivit pixio dpt vilt": vision(VIT),
    "beit data2vec-vision": vision(VIT, table_of_image, bias=WITHOUT_KEY_BIAS),
    "swin donut-swin": vision(SWIN, table_of_window),
    "swinv2": vision(SWIN, cosine_of_window, layout="cosine", bias=biased("qkv_bias", "qv", always="o", default=True)),
    "sam_vision_model sam_hq_vision_model": vision(SAM, vectors_of_window("use_rel_pos", image_layers="global_attn_indexes")),
    "vitdet": vision(VIT, vectors_of_window("use_relative_position_embeddings", window_layers="window_block_indices"), layout="stacked"),
    "dinov3_vit": vision(
        VIT, bias=biased_each, rotary=Rotary(theta=100.0, image="blocks", unit=2 * math.pi), irrelevant=f"{IMAGE_FIELDS} pos_embed_*"
    ),
    "sam3_vit_model": vision(
        VIT,
        path="layers.{n}.attention",
        bias=ALL_BIASED,
        rotary=replace(IMAGE, interleaved=True),
        irrelevant=f"{IMAGE_FIELDS} window_size global_attn_indexes",
    ),
    "pixtral": vision(CLIP, path="transformer.layers.{n}.attention", bias=NO_BIASES, rotary=replace(IMAGE, image="alternating")),
    "qwen2_vl_vision": vision(QWEN, width=("embed_dim",), irrelevant=f"{QWEN.irrelevant} hidden_size"),
    LIKE_QWEN: vision(QWEN),
    "qwen2_5_omni_vision_encoder": vision(QWEN, layout="separate"),
    "exaone4_5_vision": vision(QWEN, kv_heads=("num_key_value_heads",)),
    "glm4v_vision glm4v_moe_vision": vision(QWEN, bias=biased("attention_bias")),
    "glm_ocr_vision glm5_next_vision": vision(QWEN, normed(default=1e-5), bias=biased("attention_bias")),
    "video_llama_3_vision": vision(CLIP, rotary=IMAGE),
    "videomae": vision(VIT, bias=biased("qv_bias", "qv", always="o", default=True)),
    "tipsv2_vision_model radio": vision(TIMM),
    "clip_vision_model siglip_vision_model chinese_clip_vision_model idefics3_vision smolvlm_vision": vision(CLIP),
    "timesformer": {
        part: replace(VIT, path=f"encoder.layer.{{n}}.{name}", layout="stacked", irrelevant=f"{IMAGE_FIELDS} attention_type")
        for part, name in (("time", "temporal_attention"), ("space", "attention"))
    },
    "aimv2_vision_model": vision(VIT, path="layers.{n}.attention", bias=biased("qkv_bias")),
    "internvl_vision": vision(INTERN, FULL_NORM),
    "qianfan_ocr_vision": vision(INTERN, FULL_NORM, path="layers.{n}.attention"),
}

TRANSFORMER_XL: Fields = {"relative_scores": {"kind": "transformer_xl", "interleaved": True}}
AUDIO_FIELDS = """*conv_* feat_* adapter_attn_dim add_adapter do_stable_layer_norm"""  # fields without effect in the layers
WAV2VEC2 = replace(CLIP, path="encoder.layers.{n}.attention", irrelevant=AUDIO_FIELDS)
WHISPER = replace(CLIP, bias=WITHOUT_KEY_BIAS, irrelevant=AUDIO_FIELDS)
LASR = AttentionRow(
    rotary=Rotary(), causal=False, bias=biased("attention_bias"), irrelevant=f"{AUDIO_FIELDS} batch_norm_momentum convolution_bias"
)

CONFORMER = replace(WAV2VEC2, path="encoder.layers.{n}.self_attn")
PARAKEET = AttentionRow(
    causal=False, bias=biased("attention_bias", default=True), irrelevant=f"{AUDIO_FIELDS} scale_input convolution_bias"
)


def conformer(config: Config) -> Fields:
    """Wav2Vec2's Conformers: Transformer-XL's positions, or none; with `relative_key`, vectors for distances from `left` to `right`."""
    require_present(config, "position_embeddings_type")
    config.ignore("rotary_embedding_base", "left_max_position_embeddings", "right_max_position_embeddings")
    kind = config.get("position_embeddings_type")
    if kind == "relative_key":
        left, right = (config.count(f"{side}_max_position_embeddings") for side in ("left", "right"))
        if right > left:
            raise config.refusal("right_max_position_embeddings", f"at most {left}, left_max_position_embeddings", right)
        return {"relative_scores": {"kind": "disentangled", "max_distance": left + 1}}
    config.expect("position_embeddings_type", "relative", None)
    return TRANSFORMER_XL if kind == "relative" else {}


def fastspeech2(side: str) -> AttentionRow:
    return replace(
        CLIP,
        path=f"{side}.conformer_layers.{{n}}.self_attn",
        heads=(f"{side}_num_attention_heads",),
        layers=(f"{side}_layers",),
        traits=(constant(**TRANSFORMER_XL),),
        irrelevant=f"{AUDIO_FIELDS} encoder_* decoder_* convolution_bias use_cnn_in_conformer use_macaron_style_in_conformer",
    )


audio = partial(family, "audio")

AUDIO: dict[str, Family] = {
    "audio-spectrogram-transformer": audio(VIT),
    "wav2vec2 hubert unispeech unispeech-sat data2vec-audio sew": audio(WAV2VEC2),
    "voxtral_encoder moss_transcribe_diarize_audio": audio(WHISPER),
    "qwen2_audio_encoder": audio(WHISPER, heads=("encoder_attention_heads",), layers=("encoder_layers",)),
    "voxtral_realtime_encoder": audio(WHISPER, window_everywhere, causal=True, rotary=Rotary()),
    "lasr_encoder": audio(LASR),
    "glmasr_encoder": audio(WHISPER, kv_heads=("num_key_value_heads",), rotary=Rotary(partial=0.5)),
    "wav2vec2-conformer wav2vec2-bert": audio(CONFORMER, conformer),
    "parakeet_encoder": audio(PARAKEET, constant(**TRANSFORMER_XL)),
    "fastspeech2_conformer": {side: fastspeech2(side) for side in ("encoder", "decoder")},
}

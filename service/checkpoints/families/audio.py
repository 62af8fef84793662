"""Rows of encoders of sounds."""

from dataclasses import replace
from functools import partial

from service.checkpoints.families.row import AttentionRow, Family, family
from service.checkpoints.families.traits import TRANSFORMER_XL, WITHOUT_KEY_BIAS, biased, conformer, constant, window_everywhere
from service.checkpoints.families.vision import CLIP, VIT
from service.checkpoints.rope import Rotary

SOUNDS = "conv|feat_|codevector|^mask_|adapter|temperature|^add_|negatives|stable_layer_norm"  # fields without effect in the layers
WAV2VEC2 = replace(CLIP, path="encoder.layers.{n}.attention", irrelevant=SOUNDS)
WHISPER = replace(CLIP, bias=WITHOUT_KEY_BIAS, irrelevant=SOUNDS)
LASR = AttentionRow(rotary=Rotary(), causal=False, bias=biased("attention_bias"), irrelevant=f"{SOUNDS}|batch_norm|residual")

CONFORMER = replace(WAV2VEC2, path="encoder.layers.{n}.self_attn")
PARAKEET = AttentionRow(causal=False, bias=biased("attention_bias", default=True), irrelevant=f"{SOUNDS}|^scale_input$|^convolution_bias$")


def fastspeech2(side: str) -> AttentionRow:
    return replace(
        CLIP,
        path=f"{side}.conformer_layers.{{n}}.self_attn",
        heads=(f"{side}_num_attention_heads",),
        layers=(f"{side}_layers",),
        traits=(constant(**TRANSFORMER_XL),),
        irrelevant=f"{SOUNDS}|^(en|de)coder_|conformer|predictor|embed|^use_(weighted_)?masking$|postnet",
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

"""Rows of encoders of sounds. Relative positions by content are refused."""

from dataclasses import replace

from service.checkpoints.families.row import Attention, Family
from service.checkpoints.families.traits import WITHOUT_KEY_BIAS, Trait, biased, window_everywhere
from service.checkpoints.families.vision import CLIP, VIT
from service.checkpoints.rope import Rotary

SOUNDS = "conv|feat_|codevector|^mask_|adapter|temperature|^add_|negatives|stable_layer_norm"  # fields without effect in the layers
WAV2VEC2 = replace(CLIP, path="encoder.layers.{n}.attention", irrelevant=SOUNDS)
WHISPER = replace(CLIP, bias=WITHOUT_KEY_BIAS, irrelevant=SOUNDS)
LASR = Attention(rotary=Rotary(), causal=False, bias=biased("attention_bias"), irrelevant=f"{SOUNDS}|batch_norm|residual")


def audio(attention: Attention, *traits: Trait) -> Family:
    return {"audio": replace(attention, traits=traits)}


AUDIO: dict[str, Family] = {
    "audio-spectrogram-transformer": audio(VIT),
    **dict.fromkeys(("wav2vec2", "hubert", "unispeech", "unispeech-sat", "data2vec-audio", "sew"), audio(WAV2VEC2)),
    **dict.fromkeys(("voxtral_encoder", "moss_transcribe_diarize_audio"), audio(WHISPER)),
    "qwen2_audio_encoder": audio(replace(WHISPER, heads=("encoder_attention_heads",), layers=("encoder_layers",))),
    "voxtral_realtime_encoder": audio(replace(WHISPER, causal=True, rotary=Rotary()), window_everywhere),
    "lasr_encoder": audio(LASR),
    "glmasr_encoder": audio(replace(WHISPER, kv_heads=("num_key_value_heads",), rotary=Rotary(partial=0.5))),
}

"""Tests of LayerSpec: fingerprints of layers are promised to stay, and with them the weights that seeds draw."""

import pytest

from attend.attention.initialization import draw_weights
from attend.fingerprint import fingerprint
from attend.spec import LayerSpec

SPECS: dict[str, dict[str, object]] = {
    "plain": {},
    "grouped": {"num_kv_heads": 2, "head_dim": 6, "value_head_dim": 5, "key_dim": 7, "value_dim": 11, "output_dim": 13},
    "biases": {"bias": {"query": True, "key": False, "value": True, "output": False}, "scale": 0.25, "gain": 2.0},
    "numpy": {"init": "numpy_normal"},
    "window and softcap": {"window": {"left": 3, "right": 0}, "softcap": 30.0},
    "chunks and scaled queries": {"chunk_size": 5, "query_scale": {"factor": 0.1, "length": 4, "shift": 1}},
    "rope": {"rope": {"theta": 500.0, "scaling": {"type": "llama3", "factor": 8.0, "original_max_position": 64}}},
    "rope of pairs": {"rope": {"dims": 4, "interleaved": True, "frequencies": [1.0, 0.5], "axes": [0, 1], "attention_factor": 1.25}},
    "alibi and T5": {"alibi": True, "relative_bias": {"buckets": 8, "max_distance": 16, "bidirectional": False}},
    "Transformer-XL": {"relative_scores": {"kind": "transformer_xl", "interleaved": True}},
    "DeBERTa": {"relative_scores": {"kind": "disentangled", "max_distance": 9, "buckets": 6, "position_to_content": True}},
    "grid": {"grid_bias": {"height": 3, "width": 2, "class_token": True}},
    "decomposed grid": {"grid_bias": {"height": 3, "width": 2, "kind": "decomposed"}},
    "norms": {"qk_norm": {"kind": "layer", "weights": "own", "bias": True, "after_rope": True, "values": True}},
    "norm over all": {"qk_norm": {"over": "all", "weights": "none"}},
    "sinks and gate": {"sinks": True, "output_gate": {"granularity": "headwise", "activation": "softplus", "bias": True}},
    "latent": {"latent": {"key_value_rank": 7, "query_rank": 5, "rope_key_dim": 2, "bias": True}, "rope": {"dims": 2}},
    "indexer and gate": {
        "latent": {"key_value_rank": 7, "rope_key_dim": 2},
        "indexer": {"num_heads": 3, "head_dim": 4, "top_k": 5},
        "output_gate": {},
    },
    "differential": {"differential": {"lambda_init": 0.3, "norm_weights": False}, "rope": {}},
    "scalable softmax": {"normalizer": "scalable_softmax"},
    "sigmoid": {"normalizer": "sigmoid", "dtype": "float64"},
}
FINGERPRINTS = {  # of the layers of these specs, drawn by seed 0
    "plain": "7fc3e2c016ea02b1cdc52b9693aa3daefc622d04dbebbf527e03a1301f91169f",
    "grouped": "89874b73d08634b06f24cf73718a95de7297b37927fddb0b66be81d0d586396c",
    "biases": "e03eb77e0a397340ba5ae3e0310bda9f2557ffb1bf6eafb0b2321505cbc044d1",
    "numpy": "4223600b58835608e6f65a0bbc25bf9124c3ef3ded6e776ccf5f07d088bf9138",
    "window and softcap": "2c5bb88a9b9b5255415457e3b314917db8973eb7d9a08bbfad3220390b1cb67d",
    "chunks and scaled queries": "492cb3318895186a35c3f666eee67504e3a9c7b8fd933724b30de90e518c8109",
    "rope": "d14537d201530b27612790749737180869f02f914a03fe25884272ba08fae2b1",
    "rope of pairs": "4a3cc0aaea9342d67a9e6072e53eac36acc53cc389a9b972a824530a39a16dc5",
    "alibi and T5": "69e49d43b5900a1beb9187a8df0e28121196d6b578182ba412d89a1ec7c58571",
    "Transformer-XL": "1fe27bb3e0f876ded74802a46efe316ee1aa252ab3cc82b8d0b0700153203891",
    "DeBERTa": "806d784d2ead881d36d86a3b8f1d15fcd5100dcc544f9ff5f20495cd5c92eaf4",
    "grid": "0a50a4f33a3ade3510fb03d0f37a897c6e7986971b0a322bba8adc06921336b8",
    "decomposed grid": "9879555ffd240b047fc7f6df4c961adae8e5a228679830588e621fadfb147496",
    "norms": "07b3ee8a374b083de7ee23c8d8302d8cb7880c664826cb2f5480490fd58f46b3",
    "norm over all": "11bf2db77e4008e3bc9310993fbc72e8ecea69aaa4e28f8bc0ba912c25de4283",
    "sinks and gate": "b33a232b7c0970f38f5aa37269c5e2ba01d3783325cb6b1788ac0a84383ac2f7",
    "latent": "1745b3bb3eb5f913cc41aea096b8bee22b22e6b00f241932ffc1cfa2edfc6f8f",
    "indexer and gate": "70b5617abdbffc94be7cd044619dbe864bc9470759bdb011ba79c59323ac69d5",
    "differential": "d701e81a29f865a2ec25edaf272fe3ae1928bc53466414c9438621fe7b62c387",
    "scalable softmax": "f7cddfd61ca045144d1496ed8087417fe1085b09eb15659c725d18acfcacfe38",
    "sigmoid": "685841560b7ff908dc708ebf198166c99bdf5e232cc04cada399a71dbfaa44f7",
}


@pytest.mark.parametrize("name", SPECS)
def test_a_spec_has_the_fingerprint_that_it_always_had(name: str) -> None:
    spec = LayerSpec.model_validate({"d_model": 32, "num_heads": 4, **SPECS[name]})
    assert fingerprint(spec, draw_weights(spec)) == FINGERPRINTS[name]

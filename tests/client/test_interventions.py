"""Interventions on heads, against the same changes made by hooks in transformers' own eager code."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
import torch

import attend
from attend import Change, Client
from attend.errors import InvalidRequest

pytestmark = pytest.mark.slow  # the extra `test` does not install transformers
TOKENS = torch.tensor([[5, 7, 11, 13, 2, 3, 29], [17, 19, 23, 4, 6, 8, 9]])
OTHER = torch.tensor([[1, 9, 14, 25, 16, 3, 27], [18, 10, 22, 24, 21, 15, 12]])
SIZES = {"hidden_size": 24, "intermediate_size": 17, "num_hidden_layers": 2, "vocab_size": 31}
OUTPUT = {
    "gpt2": "c_proj",
    "llama": "o_proj",
    "gpt_oss": "o_proj",
    "t5": "o",
    "whisper": "out_proj",
    "swin": "o_proj",
}  # name of the output projection in the attention module
HEADS = {"gpt2": 3, "llama": 4, "gpt_oss": 4, "bert": 3, "t5": 3, "whisper": 3, "swin": 3}
LAYERS = {"gpt2": 2, "llama": 2, "gpt_oss": 2, "bert": 2, "t5": 6, "whisper": 6, "swin": 2}


def tiny(family: str) -> tuple[Any, list[dict[str, Any]]]:
    """A model of random weights, large enough that its heads attend sharply, and two inputs of equal shapes."""
    import transformers as hf

    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    inputs: list[dict[str, Any]] = [{"input_ids": ids} for ids in (TOKENS, OTHER)]
    if family == "gpt2":
        model: Any = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=31, n_embd=24, n_layer=2, n_head=3, n_positions=11, n_inner=17))
        inputs[0] |= {"labels": TOKENS}
    elif family == "llama":
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2))
    elif family == "gpt_oss":  # with sinks
        options = {"num_key_value_heads": 2, "sliding_window": 3, "num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 6}
        options["experts_implementation"] = "eager"
        model = hf.GptOssForCausalLM(hf.GptOssConfig(**SIZES, num_attention_heads=4, **options))
    elif family == "swin":  # the windows of the second layer are shifted
        sizes = {"image_size": 15, "patch_size": 3, "window_size": 3, "embed_dim": 24, "depths": [2], "num_heads": [3], "num_channels": 2}
        model = hf.SwinForImageClassification(hf.SwinConfig(**sizes))
        images = np.random.default_rng(4).standard_normal((2, 2, 2, 15, 15)).astype(np.float32)
        inputs = [{"pixel_values": torch.from_numpy(two)} for two in images]
    elif family == "bert":
        model = hf.BertForMaskedLM(hf.BertConfig(**SIZES, num_attention_heads=3))
        for one in inputs:
            one["attention_mask"] = torch.tensor([[1] * 7, [1] * 5 + [0] * 2])
    elif family == "t5":
        model = hf.T5ForConditionalGeneration(hf.T5Config(d_model=24, d_kv=5, d_ff=17, num_layers=2, num_heads=3, vocab_size=31, **ends))
        for one in inputs:
            one["decoder_input_ids"] = one["input_ids"][:, :5]
    else:
        both = {"layers": 2, "attention_heads": 3, "ffn_dim": 17}
        sides = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in both.items()}
        sizes = {"d_model": 24, "vocab_size": 31, "num_mel_bins": 5, "max_source_positions": 11, "max_target_positions": 13}
        model = hf.WhisperForConditionalGeneration(hf.WhisperConfig(**sides, **ends, **sizes))
        sounds = np.random.default_rng(4).standard_normal((2, 2, 5, 22)).astype(np.float32)
        inputs = [
            {"input_features": torch.from_numpy(sound), "decoder_input_ids": ids[:, :5]}
            for sound, ids in zip(sounds, (TOKENS, OTHER), strict=True)
        ]
    rng = np.random.default_rng(3)
    for parameter in model.parameters():
        parameter.data = torch.from_numpy(rng.standard_normal(tuple(parameter.shape)).astype(np.float32) * 0.5)
    return model.eval().requires_grad_(False), inputs


class Eager:
    """transformers' eager model, whose layers may be changed: weights where eager code computes them, outputs before the projection."""

    def __init__(self, model: Any, family: str, names: list[str]) -> None:
        self.model, self.heads = model, HEADS[family]
        self.attention = {model.get_submodule(name): number for number, name in enumerate(names)}
        self.projections = []
        for name in names:
            parent = model.get_submodule(name.rpartition(".")[0])
            self.projections.append(parent.output.dense if family == "bert" else getattr(model.get_submodule(name), OUTPUT[family]))

    @contextmanager
    def changed(self, weights: Callable[[int, Any], Any], outputs: Callable[[int, Any], Any]) -> Iterator[None]:
        """`weights(layer, [b, h, q, k])` and `outputs(layer, [b, q, h, d])` return what takes their place."""

        def eager(module, query, key, value, mask, scaling=None, **more: Any):  # type: ignore[no-untyped-def]
            own = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
            _, scores = original(module, query, key, value, mask, scaling=scaling, **more)
            scores = weights(self.attention[module], scores)
            return (scores @ own).transpose(1, 2).contiguous(), scores

        def before(number: int) -> Callable[..., Any]:
            def hook(_: Any, values: Any) -> Any:
                split = values[0].view(*values[0].shape[:-1], self.heads, -1)
                return (outputs(number, split).reshape(values[0].shape),)

            return hook

        before_all = self.model.config._attn_implementation
        self.model.set_attn_implementation("eager")
        code = sys.modules[next(type(module).__module__ for module in self.attention)]
        original = code.eager_attention_forward
        with ExitStack() as stack:
            stack.callback(self.model.set_attn_implementation, before_all)
            for number, projection in enumerate(self.projections):
                stack.callback(projection.register_forward_pre_hook(before(number)).remove)
            code.eager_attention_forward = eager
            stack.callback(setattr, code, "eager_attention_forward", original)
            yield

    def run(self, inputs: Any, weights: Any = lambda _, x: x, outputs: Any = lambda _, x: x) -> tuple[Any, list[Any], list[Any]]:
        """Logits, and of each layer weights and outputs of heads, as changed."""
        seen: tuple[dict[int, Any], dict[int, Any]] = ({}, {})

        def kept(at: int, function: Any) -> Any:
            return lambda number, x: seen[at].setdefault(number, function(number, x))

        with self.changed(kept(0, weights), kept(1, outputs)), torch.no_grad():
            logits = self.model(**inputs).logits.numpy()
        return logits, *([series[number] for number in range(len(self.attention))] for series in seen)  # type: ignore[return-value]


def replaced(layer: int, heads: list[int], make: Callable[[Any], Any], axis: int, queries: Any = slice(None)) -> Callable[[int, Any], Any]:
    """A change of heads of one layer; `axis` is that of the heads."""

    def change(number: int, x: Any) -> Any:
        if number != layer:
            return x
        x, made = x.clone(), make(x)
        for head in heads:
            if axis == 1:
                x[:, head, queries] = made[:, head, queries]
            else:
                x[:, queries, head] = made[:, queries, head]
        return x

    return change


@pytest.mark.parametrize("family", HEADS)
def test_changes_equal_those_by_hooks_in_eager_code(server: Any, family: str) -> None:
    model, (inputs, others) = tiny(family)
    with Client(server.url) as client:
        before = model.config._attn_implementation
        with attend.interventions(model, client) as study:
            plain, donor = study.run(inputs), study.run(others)
            eager = Eager(model, family, study.layers)
            assert len(study.layers) == LAYERS[family]
            for layer in range(LAYERS[family]):
                compare(study, eager, (inputs, others), layer, plain, donor)
        assert model.config._attn_implementation == before


def compare(study: Any, eager: Eager, inputs: Any, layer: int, plain: Any, donor: Any) -> None:
    """Every change of heads 0 and 2 of a layer."""
    heads, chosen = [0, 2], [1, -1]
    (logits, weights, _outputs), (_, other_weights, other_outputs) = (eager.run(one) for one in inputs)
    visible = weights[layer] > 1e-20  # Swin's hidden pairs have exp(-100)
    real = inputs[0].get("attention_mask", torch.ones(weights[layer].shape[::2], dtype=torch.long))  # [b, q]

    def mean(x: Any, axes: tuple[int, ...], counted: Any) -> Any:
        """Over the rows that count, for each row."""
        return ((x * counted).sum(axes, keepdim=True) / counted.expand(x.shape).sum(axes, keepdim=True).clamp(min=1)).expand_as(x)

    cases: list[tuple[Change, Any, Any]] = [
        (Change(layer, heads, scale=0), None, replaced(layer, heads, torch.zeros_like, 2)),
        (Change(layer, heads, scale=-1.5), None, replaced(layer, heads, lambda x: -1.5 * x, 2)),
        (Change(layer, heads, pattern="uniform"), replaced(layer, heads, lambda _: visible / visible.sum(-1, keepdim=True), 1), None),
        (Change(layer, heads, pattern="mean"), replaced(layer, heads, lambda x: mean(x, (0,), real[:, None, :, None]), 1), None),
        (Change(layer, heads, pattern=donor, queries=chosen), replaced(layer, heads, lambda _: other_weights[layer], 1, chosen), None),
        (Change(layer, heads, outputs="mean"), None, replaced(layer, heads, lambda x: mean(x, (0, 1), real[:, :, None, None]), 2)),
        (Change(layer, heads, outputs=donor), None, replaced(layer, heads, lambda _: other_outputs[layer], 2)),
        (Change(layer, heads, outputs=donor, queries=chosen), None, replaced(layer, heads, lambda _: other_outputs[layer], 2, chosen)),
    ]
    if weights[layer].shape[2] == weights[layer].shape[3]:
        eye = torch.eye(weights[layer].shape[2]).expand_as(weights[layer])
        cases.append((Change(layer, heads, pattern="diagonal"), replaced(layer, heads, lambda _: eye, 1), None))
    np.testing.assert_allclose(plain.logits, logits, atol=1e-5 * np.abs(logits).max())
    np.testing.assert_allclose(plain.attention_weights[layer], weights[layer], atol=1e-5)
    for change, of_weights, of_outputs in cases:
        same: Any = lambda _, x: x  # noqa: E731
        expected, _, _ = eager.run(inputs[0], of_weights or same, of_outputs or same)
        with_study = study.run(inputs[0], change)
        assert np.abs(expected - logits).max() > 1e-4 * np.abs(logits).max(), change  # the change has an effect
        np.testing.assert_allclose(with_study.logits, expected, atol=1e-5 * np.abs(expected).max(), err_msg=str(change))


def test_effects_of_all_heads_losses_and_probabilities(server: Any) -> None:
    """One run for each head; changes of several layers together; the loss of the model."""
    model, (inputs, others) = tiny("gpt2")
    with Client(server.url) as client, attend.interventions(model, client) as study:
        plain, donor = study.run(inputs), study.run(others)
        row = torch.log_softmax(torch.from_numpy(plain.logits[1, 4]).double(), -1)
        assert plain.probability(7, position=4, item=1) == pytest.approx(float(row[7].exp()))
        shifted = torch.log_softmax(torch.from_numpy(plain.logits[:, :-1]).double(), -1)
        nll = -shifted.gather(-1, TOKENS[:, 1:, None]).mean()
        assert plain.loss == pytest.approx(float(nll), abs=1e-5) and donor.loss is None
        effects = study.effects(inputs, lambda run: run.probability(7))
        losses = study.effects(inputs, lambda run: run.loss, outputs=donor, queries=[3])
        logits = study.effects(inputs, lambda run: run.logits[0, -1], pattern="uniform")
        assert (effects.shape, losses.shape, logits.shape) == ((2, 3), (2, 3), (2, 3, 31))
        alone = study.run(inputs, Change(1, [2], scale=0))
        assert effects[1, 2] == pytest.approx(alone.probability(7) - plain.probability(7))
        everything = study.run(inputs, *(Change(layer, outputs=donor) for layer in range(2)), Change(1, [0], pattern="uniform"))
        assert np.abs(everything.logits - plain.logits).max() > 1e-3
        both = study.run(inputs, Change(0, [1], scale=0), Change(0, [0], scale=2), Change(1, [2], outputs=np.zeros(8)))
        eager = Eager(model, "gpt2", study.layers)

        def outputs(number: int, x: Any) -> Any:
            factors = torch.tensor([[2.0, 0.0, 1.0], [1.0, 1.0, 0.0]])[number]
            return x * factors[:, None]

        expected, _, _ = eager.run(inputs, outputs=outputs)
        np.testing.assert_allclose(both.logits, expected, atol=1e-5 * np.abs(expected).max())


def test_what_else_runs_the_model_in_the_block_gets_no_changes(server: Any) -> None:
    """A call of the model itself after a run with a change, or a capture; heads are given as an array."""
    model, (inputs, _) = tiny("llama")
    with Client(server.url) as client, attend.interventions(model, client) as study, torch.no_grad():
        plain, off = study.run(inputs), study.run(inputs, Change(0, np.array([0, 2]), scale=0))
        captured = attend.capture(model, inputs, client, name="within")
        assert captured.difference < 1e-5
        np.testing.assert_array_equal(model(**inputs).logits, plain.logits)
        np.testing.assert_array_equal(study.run(inputs, Change(0, [-2, 0], scale=0)).logits, off.logits)
        assert np.abs(off.logits - plain.logits).max() > 1e-3
        for name in captured:
            client.delete_layer(name)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_direct_attribution_is_the_logit_without_the_output_of_a_head_in_the_residual_stream(server: Any, family: str) -> None:
    """By hand: the final norm of the stream without what the projection made of one head, with the statistics of the whole stream."""
    model, (inputs, _) = tiny(family)
    with Client(server.url) as client, attend.interventions(model, client) as study:
        found = study.attribution(inputs, 7, other=3, position=4, item=1)
        eager = Eager(model, family, study.layers)
    norm = model.transformer.ln_f if family == "gpt2" else model.model.norm
    seen: list[Any] = []
    handle = norm.register_forward_hook(lambda _, values, __: seen.append(values[0][1, 4]))
    _, _, outputs = eager.run(inputs)
    handle.remove()
    stream = seen[0]
    for layer, projection in enumerate(eager.projections):
        matrix = projection.weight if family == "gpt2" else projection.weight.T  # [h * d, d_model]
        for head in range(eager.heads):
            width = len(matrix) // eager.heads
            added = outputs[layer][1, 4, head] @ matrix[head * width : (head + 1) * width]
            if family == "gpt2":
                normed = norm.weight * (added - added.mean()) / (stream.var(correction=0) + norm.eps).sqrt()
            else:
                normed = norm.weight * added / (stream.square().mean() + norm.variance_epsilon).sqrt()
            logits = model.lm_head.weight @ normed
            assert found[layer, head] == pytest.approx(float(logits[7] - logits[3]), abs=1e-4)


OTHERS: dict[str, tuple[str, dict[str, Any]]] = {  # families that differ in window, caps, norms, biases, or in what is beside attention
    "gemma2": ("Gemma2ForCausalLM", {"head_dim": 10, "num_key_value_heads": 1, "sliding_window": 3, "attn_logit_softcapping": 2.0}),
    "mistral": ("MistralForCausalLM", {"num_key_value_heads": 1, "sliding_window": 3}),
    "qwen3": ("Qwen3ForCausalLM", {"num_key_value_heads": 1, "head_dim": 10}),
    "phi": ("PhiForCausalLM", {}),
    "gpt_neox": ("GPTNeoXForCausalLM", {}),
    "opt": ("OPTForCausalLM", {"ffn_dim": 17, "word_embed_proj_dim": 24, "max_position_embeddings": 11}),
    "bart": ("BartForConditionalGeneration", {"d_model": 24, "layers": 2}),
    "modernbert": ("ModernBertForMaskedLM", {"local_attention": 4}),
    "vit": ("ViTForImageClassification", {"image_size": 9, "patch_size": 3, "num_channels": 2}),
    "afmoe": ("AfmoeForCausalLM", {"num_key_value_heads": 1, "head_dim": 10, "num_experts": 2, "num_experts_per_tok": 1}),
}


@pytest.mark.parametrize("family", OTHERS)
def test_a_head_without_output_in_other_families(server: Any, family: str) -> None:
    """Against the family's own eager function, from whose output the head is taken."""
    import transformers as hf

    name, options = OTHERS[family]
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if family == "bart":
        sides = {f"{side}_{n}": x for side in ("encoder", "decoder") for n, x in {"layers": 2, "attention_heads": 3, "ffn_dim": 17}.items()}
        config: Any = hf.BartConfig(d_model=24, vocab_size=31, max_position_embeddings=11, **sides)
    else:
        config = hf.CONFIG_MAPPING[family](**SIZES, num_attention_heads=3, **ends, **options)
    model = getattr(hf, name)(config)
    rng = np.random.default_rng(3)
    for parameter in model.parameters():
        parameter.data = torch.from_numpy(rng.standard_normal(tuple(parameter.shape)).astype(np.float32) * 0.5)
    model.eval().requires_grad_(False)
    inputs: dict[str, Any] = {"input_ids": TOKENS}
    if family == "vit":
        inputs = {"pixel_values": torch.from_numpy(rng.standard_normal((2, 2, 9, 9)).astype(np.float32))}
    with Client(server.url) as client, attend.interventions(model, client) as study:
        plain = study.run(inputs)
        runs = [study.run(inputs, Change(layer, [1], scale=0)) for layer in range(len(study.layers))]
        names = study.layers
    model.set_attn_implementation("eager")
    modules = [model.get_submodule(name) for name in names]
    code = sys.modules[type(modules[0]).__module__]
    original, chosen = code.eager_attention_forward, None

    def eager(module: Any, *tensors: Any, **more: Any) -> Any:
        output, weights = original(module, *tensors, **more)
        if module is chosen:
            output = output.clone()
            output[:, :, 1] = 0
        return output, weights

    code.eager_attention_forward = eager
    try:
        with torch.no_grad():
            own = model(**inputs).logits.numpy()
            np.testing.assert_allclose(plain.logits, own, atol=1e-5 * np.abs(own).max())
            for chosen, run in zip(modules, runs, strict=True):  # noqa: B007  # read by `eager`
                theirs = model(**inputs).logits.numpy()
                assert np.abs(theirs - own).max() > 1e-4 * np.abs(own).max()
                np.testing.assert_allclose(run.logits, theirs, atol=1e-5 * np.abs(theirs).max())
    finally:
        code.eager_attention_forward = original


def test_padding_is_in_no_mean(server: Any) -> None:
    """The same text with and without padding has the same answer, also beside a text of another length."""
    model, _ = tiny("llama")
    ids, other = TOKENS[:1, :5], TOKENS[1:]
    padded = torch.cat([torch.cat([torch.zeros(1, 2, dtype=torch.long), ids], 1), other])
    mask = torch.tensor([[0] * 2 + [1] * 5, [1] * 7])
    both = {"input_ids": padded, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    with Client(server.url) as client, attend.interventions(model, client) as study:
        alone = [study.run({"input_ids": each}) for each in (ids, other)]
        rows = np.concatenate([run.head_outputs[0] for run in alone], 2)  # [1, h, 5 + 7, d]
        expected = [
            study.run({"input_ids": each}, Change(0, [0, 3], outputs=rows.mean(2, keepdims=True))).logits[0, -1] for each in (ids, other)
        ]
        found = study.run(both, Change(0, [0, 3], outputs="mean")).logits[:, -1]
        one = study.run({name: x[:1] for name, x in both.items()}, Change(1, outputs="mean")).logits[0, -1]
        np.testing.assert_allclose(one, study.run({"input_ids": ids}, Change(1, outputs="mean")).logits[0, -1], atol=1e-4)
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


def test_a_model_in_float64_is_studied_in_float64(server: Any) -> None:
    model, (inputs, _) = tiny("gpt2")  # whose eager softmax is in float64 too
    model = model.double()
    with Client(server.url) as client, attend.interventions(model, client) as study:
        plain, changed = study.run(inputs), study.run(inputs, Change(1, [2], scale=-1.5))
        eager = Eager(model, "gpt2", study.layers)
    for run, outputs in ((plain, None), (changed, replaced(1, [2], lambda x: -1.5 * x, 2))):
        expected, _, _ = eager.run(inputs, **({"outputs": outputs} if outputs else {}))
        np.testing.assert_allclose(run.logits, expected, atol=1e-12 * np.abs(expected).max())
    assert plain.logits.dtype == plain.attention_weights[0].dtype == plain.head_outputs[0].dtype == np.float64


def test_the_layers_of_a_study_are_removed_at_its_end(server: Any) -> None:
    """Those that the service had before stay, also after an error in the block."""
    model, (inputs, _) = tiny("gpt_oss")
    with Client(server.url) as client:
        with attend.interventions(model, client) as study:
            study.run(inputs)
        before = {layer.name for layer in client.layers()}
        client.put_layer("transformers-4-2-6-6", {"d_model": 24, "num_heads": 4, "num_kv_heads": 2, "projections": False})
        for family in ("gpt_oss", "llama"):  # the second needs the layer that is there
            model, (inputs, _) = tiny(family)
            with pytest.raises(InvalidRequest, match="a layer below 2"), attend.interventions(model, client) as study:
                study.run(inputs)
                within = {layer.name for layer in client.layers()}
                study.run(inputs, Change(2, scale=0))
            assert len(within - before) == (3 if family == "gpt_oss" else 1)
            assert {layer.name for layer in client.layers()} == before | {"transformers-4-2-6-6"}
        client.delete_layer("transformers-4-2-6-6")


def test_what_does_not_fit_is_refused(server: Any) -> None:
    model, (inputs, _) = tiny("bert")
    with Client(server.url) as client:
        study = attend.interventions(model, client)
        with pytest.raises(InvalidRequest, match="in the `with` block, got one outside"):
            study.run(inputs)
        with pytest.raises(InvalidRequest, match="a run before, which shows in what order the layers are called, got none, at /layers"):
            _ = study.layers
        with study:
            one = {name: x[:1] for name, x in inputs.items()}
            for change, text in (
                (Change(2, scale=0), "a layer below 2"),
                (Change(0, [3], scale=0), "an index below 3, in layer 0"),
                (Change(0, queries=[7], pattern="uniform"), "an index below 7"),
                (Change(0, pattern="mean"), "several items"),
                (Change(0, pattern=np.ones((2, 7, 7))), r"broadcasts to \[1, 3, 7, 7\]"),
            ):
                with pytest.raises(InvalidRequest, match=text):
                    study.run(one, change)
            with pytest.raises(InvalidRequest, match="final norm"):
                study.attribution(inputs, 3)
            with pytest.raises(InvalidRequest, match="tokenizer"):
                study.run("a text")
            run = study.run(one)
            assert repr(run) == "Run(logits [1, 7, 31], 2 layers)"
            for token in ("Mary", 31, 1.0, None):
                with pytest.raises(InvalidRequest, match=f"the number of a token, below 31, .*, got {token!r}, at /token"):
                    run.probability(token)
    import transformers as hf

    own = hf.BloomForCausalLM(hf.BloomConfig(hidden_size=24, n_layer=1, n_head=3, vocab_size=31))
    refused = pytest.raises(InvalidRequest, match="got BloomForCausalLM, whose attention is code of its own")
    with Client(server.url) as client, attend.interventions(own, client) as study, refused:
        study.run({"input_ids": TOKENS})
    with pytest.raises(InvalidRequest, match="scale, pattern or outputs"):
        Change(0)
    for fields, text in (
        ({"layer": "attn.0"}, "the number of a layer, got 'attn.0', at /layer"),
        ({"heads": 2}, "a list of one or more integers, or None for all, got 2, at /heads"),
        ({"heads": [True, False, True]}, "a list of one or more integers"),
        ({"heads": []}, r"one or more integers, or None for all, got \[\], at /heads"),
        ({"queries": np.zeros(0, int)}, r"one or more integers, .*, at /queries"),
        ({"queries": [1.5]}, r"got \[1.5\], at /queries"),
    ):
        with pytest.raises(InvalidRequest, match=text):
            Change(**{"layer": 0, "pattern": "uniform", **fields})
    with Client(server.url) as client:
        with attend.interventions(model, client) as study, pytest.raises(InvalidRequest, match=r"type attend\.Change, got \{'layer': 0\}"):
            study.run(one, {"layer": 0})
        for wrong, got in ((torch.nn.Linear(2, 3), "Linear"), ("gpt2", "the text 'gpt2'")):
            with pytest.raises(InvalidRequest, match=rf"a model of transformers, as AutoModel.* returns it, got {got}, at /model"):
                attend.interventions(wrong, client)
    with pytest.raises(InvalidRequest, match="scale"):
        Change(0, scale=0, queries=[1])

"""A class is constructed with the sizes of its spec, and what these are is found by calls where no spec says it."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attend import check
from attend.check import Comparison
from attend.check.constructor import Configuration
from attend.spec import LayerSpec


def compare(candidate: Any, **options: Any) -> Comparison:
    """The comparison in calls that are long enough for every window and distance here."""
    return check.compare(candidate, longest=65, **options)


def rotate_half(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


class Sliding(nn.Module):
    """Mistral's: causal, RoPE by tables, a window of so many keys."""

    further = 0  # keys

    def __init__(self, hidden_size: int, num_attention_heads: int, num_key_value_heads: int, sliding_window: int = 11) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.window = num_attention_heads, num_key_value_heads, sliding_window
        self.head_dim = hidden_size // num_attention_heads
        self.q_proj, self.o_proj = (nn.Linear(hidden_size, hidden_size, bias=False) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(hidden_size, self.kv_heads * self.head_dim, bias=False) for _ in range(2))

    def visible(self, distance: Tensor) -> Tensor:
        return (distance >= 0) & (distance < self.window + self.further)

    def forward(self, hidden_states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (p(hidden_states).unflatten(2, (-1, self.head_dim)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (x * cos + rotate_half(x) * sin for x in (q, k))
        k, v = (x.repeat_interleave(self.heads // self.kv_heads, 1) for x in (k, v))
        rows = torch.arange(q.shape[2])
        scores = self.scored(q @ k.transpose(2, 3) / self.head_dim**0.5)
        weights = scores.masked_fill(~self.visible(rows[:, None] - rows), -torch.inf).softmax(-1)
        output: Tensor = self.o_proj((weights @ v).transpose(1, 2).flatten(2))
        return output

    def scored(self, scores: Tensor) -> Tensor:
        return scores


class Bent(Sliding):
    """Wrong in a way that has no name."""

    def scored(self, scores: Tensor) -> Tensor:
        return scores + 0.3 * scores.square().sin()


class Without(Sliding):
    """Has no window, whatever it is constructed with."""

    def visible(self, distance: Tensor) -> Tensor:
        return distance >= 0


def local_attention(query: Tensor, key: Tensor, value: Tensor, window: int = 47) -> Tensor:
    distance = torch.arange(query.shape[2])[:, None] - torch.arange(key.shape[2])
    scores = query @ key.transpose(2, 3) / query.shape[3] ** 0.5
    weights = scores.masked_fill((distance < 0) | (distance >= window), -torch.inf).softmax(-1)
    return torch.matmul(weights, value)


def shorter_attention(query: Tensor, key: Tensor, value: Tensor, window: int = 47) -> Tensor:
    return local_attention(query, key, value, window - 1)


def test_the_window_of_a_spec_is_what_a_class_is_constructed_with() -> None:
    spec = LayerSpec.model_validate(
        {"d_model": 28, "num_heads": 2, "num_kv_heads": 1, "bias": False, "rope": {}, "window": {"left": 6}, "dtype": "float64"}
    )
    assert compare(Sliding, spec=spec).agrees
    wrong = compare(type("Longer", (Sliding,), {"further": 1}), spec=spec)
    assert wrong.first and wrong.first.mistakes == ("the window has one key more",)


def test_a_layer_for_which_it_raises_is_not_what_it_is_meant_to_be() -> None:
    report = compare(Bent)
    assert not report.agrees
    assert not any(result.raised for result in report.results)
    assert not any("of each head" in words for words in report.found)


def test_a_window_that_is_a_size_of_the_constructor_is_found_by_calls() -> None:
    for cls in (Sliding, Without):
        report = compare(cls)
        assert report.agrees, report
        assert any("a window of 5 keys" in words for words in report.found) is (cls is Sliding)


def test_a_wrong_window_that_is_a_size_of_the_constructor_has_its_name() -> None:
    report = compare(type("Longer", (Sliding,), {"further": 1}))
    assert report.first and report.first.mistakes == ("the window has one key more",)


def test_a_parameter_of_a_function_that_is_the_size_of_a_window_gets_a_small_one() -> None:
    report = compare(local_attention)
    assert report.agrees
    assert not report.parameters
    wrong = compare(shorter_attention)
    assert wrong.first and wrong.first.mistakes == ("the window has one key less",)


class T5(nn.Module):
    """T5's biases by distance, which the encoder has for both directions and the decoder for one."""

    directions, is_divided, sign = 2, False, 1

    def __init__(self, d_model: int, num_heads: int, num_buckets: int = 32, max_distance: int = 29) -> None:
        super().__init__()
        self.num_heads, self.num_buckets, self.max_distance = num_heads, num_buckets, max_distance
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model, bias=False) for _ in range(4))
        self.relative_attention_bias = nn.Embedding(num_buckets, num_heads)

    def bucket(self, distance: Tensor) -> Tensor:
        n = self.num_buckets // self.directions
        first = (distance > 0).long() * n if self.directions == 2 else torch.zeros_like(distance)
        distance = distance.abs() if self.directions == 2 else (-distance).clamp(min=0)
        exact = n // 2
        far = exact + ((distance.float() / exact).log() / math.log(self.max_distance / exact) * (n - exact)).long()
        return first + torch.where(distance < exact, distance, far.clamp(max=n - 1))

    def forward(self, hidden_states: Tensor) -> Tensor:
        q, k, v = (p(hidden_states).unflatten(2, (self.num_heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        rows = torch.arange(q.shape[2])
        bias = self.relative_attention_bias(self.bucket(self.sign * (rows - rows[:, None]))).permute(2, 0, 1)
        scores = q @ k.transpose(2, 3) / (q.shape[3] ** 0.5 if self.is_divided else 1.0) + bias
        if self.directions == 1:
            scores = scores.masked_fill(rows > rows[:, None], -torch.inf)
        output: Tensor = self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return output


@pytest.mark.parametrize(
    ("differs", "words"),
    [
        ({}, "relative_bias"),
        ({"directions": 1}, "T5's biases of earlier keys alone"),
        ({"is_divided": True}, "T5's biases of earlier and later keys, and scores divided by sqrt(head_dim)"),
    ],
)
def test_t5_biases_are_found_by_the_name_of_their_weight(differs: dict[str, Any], words: str) -> None:
    report = compare(type("Variant", (T5,), differs))
    assert report.agrees, report
    assert any(words in found for found in report.found), report.found


def test_t5_biases_of_the_opposite_distance_are_wrong() -> None:
    report = compare(type("Turned", (T5,), {"sign": -1}))
    assert report.first and report.first.step and report.first.step.names == ("t5_bias",)


def test_the_sizes_of_a_family_are_told_of_what_disagrees_with_it() -> None:
    assert compare(Sliding, spec="mistral").agrees
    report = compare(Without, spec="mistral")
    assert "compared with mistral: d_model 32, 4 heads of 8 numbers, 2 of keys, window 4 before" in " ".join(str(report).split())


def test_an_exception_of_a_constructor_is_shown_with_its_arguments():
    class Attention(nn.Module):
        def __init__(self, d_model, num_heads):
            super().__init__()
            _, _ = (d_model,)

    with pytest.raises(ValueError, match=r"^ValueError: not enough values .*; constructed with d_model=12, num_heads=3$"):
        compare(Attention)


class OfConfig(T5):
    """Reads its sizes from an object with the names of transformers, and returns a dictionary."""

    def __init__(self, config):
        assert config.d_model == config.num_heads * config.d_kv and config.rope_theta == 10000.0
        assert config.query_pre_attn_scalar == config.d_kv and config.attn_logit_softcapping is None
        super().__init__(config.d_model, config.num_heads, config.relative_attention_num_buckets, config.relative_attention_max_distance)

    def forward(self, hidden_states):
        return {"output": super().forward(hidden_states)}


def test_a_configuration_has_what_layers_are_often_asked_for() -> None:
    report = compare(OfConfig)
    assert report.agrees and any("relative_bias" in found for found in report.found), report


@dataclass
class Validated:
    """A configuration as in transformers: it refuses values of another type, and names of a few fields look like sizes."""

    hidden_size: int = 64
    num_attention_heads: int = 8
    num_key_value_heads: int | None = None
    hidden_act: str = "gelu"
    tie_word_embeddings: bool = False
    channels_of_stages: tuple[int, ...] = (8, 16)
    rope_scaling: dict[str, Any] | None = None
    attention_dropout: float | int = 0.0
    sliding_window: int = 2  # None is refused
    out_features: list[str] | None = None  # names alone
    embed_shift: float | None = None

    def __post_init__(self) -> None:
        assert self.out_features is self.embed_shift is None
        for name, value in vars(self).items():
            default = type(self).__dataclass_fields__[name].default
            assert default is None or isinstance(value, type(default)) or name == "attention_dropout", f"{name}={value}"


class OfValidated(Sliding):
    def __init__(self, config: Validated | None = None) -> None:
        assert config and config.hidden_act == "gelu" and config.channels_of_stages == (8, 16)
        super().__init__(config.hidden_size, config.num_attention_heads, config.num_key_value_heads or 0, config.sliding_window)


def test_a_configuration_that_validates_its_fields_gets_those_of_its_types() -> None:
    assert compare(OfValidated).agrees
    report = compare(type("Wrong", (OfValidated,), {"visible": lambda self, distance: distance >= -1}))
    assert "each query see the next key" in str(report.first)


class Off(nn.Module):
    """Options that are off by default."""

    further = 0  # keys that are seen

    def __init__(self, hidden_size: int, num_heads: int, causal: bool = False, sliding_window: int | None = None) -> None:
        super().__init__()
        self.heads, self.causal, self.window = num_heads, causal, sliding_window
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(hidden_size, hidden_size) for _ in range(4))

    def blocked(self, distance: Tensor) -> Tensor:
        of_window = (
            torch.zeros_like(distance, dtype=torch.bool) if self.window is None else distance.abs() > self.window // 2 + self.further
        )
        return of_window | (distance < -self.further) if self.causal else of_window

    def forward(self, hidden_states: Tensor) -> Tensor:
        q, k, v = (p(hidden_states).unflatten(2, (self.heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        rows = torch.arange(q.shape[2])
        scores = (q @ k.mT / q.shape[3] ** 0.5).masked_fill(self.blocked(rows[:, None] - rows), -torch.inf)
        output: Tensor = self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return output


def test_options_of_a_constructor_that_are_off_are_turned_on() -> None:
    report = compare(Off)
    assert report.agrees and report.is_complete, report
    assert {"sliding_window=5", "causal=True"} <= {x.case for x in report.results if x.agrees}
    wrong = compare(type("Further", (Off,), {"further": 1}))
    assert {x.case for x in wrong.results if x.agrees is False} >= {"no mask, causal=True"}
    assert wrong.first and wrong.first.mistakes


def test_an_option_whose_numbers_have_no_name_is_untried() -> None:
    def blocked(self: Off, distance: Tensor) -> Tensor:
        return distance < 0 if self.causal else (distance % 2 == 1) & (self.window is not None)

    report = compare(type("Odd", (Off,), {"blocked": blocked}))
    assert report.agrees and [x.case for x in report.results if x.untried and not x.impossible] == ["sliding_window=5"], report


def test_causality_that_a_mask_may_stand_for_is_untried() -> None:
    def forward(self: Off, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        self.blocked = lambda _: ~attention_mask  # type: ignore[method-assign]
        return Off.forward(self, hidden_states)

    report = compare(type("OfMasks", (Off,), {"forward": forward}), mask_means="attend")
    assert report.agrees and {x.case for x in report.results if x.untried and not x.impossible} == {"causal=True", "sliding_window=5"}, (
        report
    )


class Partial(nn.Module):
    """RoPE on half of each head."""

    def __init__(self, hidden_size: int, num_heads: int, rotary_emb_base: float = 10000.0) -> None:
        super().__init__()
        self.heads, self.head_dim, self.base = num_heads, hidden_size // num_heads, rotary_emb_base
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(hidden_size, hidden_size) for _ in range(4))

    def exponents(self, dims: int) -> Tensor:
        return torch.arange(0, dims, 2) / dims

    def forward(self, hidden_states: Tensor) -> Tensor:
        q, k, v = (p(hidden_states).unflatten(2, (self.heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        dims = self.head_dim // 2
        angles = torch.outer(torch.arange(q.shape[2]).float(), self.base ** -self.exponents(dims)).repeat(1, 2)
        q, k = (torch.cat((x[..., :dims] * angles.cos() + rotate_half(x[..., :dims]) * angles.sin(), x[..., dims:]), -1) for x in (q, k))
        output: Tensor = self.o_proj(((q @ k.mT / self.head_dim**0.5).softmax(-1) @ v).transpose(1, 2).flatten(2))
        return output


def test_frequencies_of_rope_are_told_in_heads_that_have_several() -> None:
    assert any("RoPE on halves of 0.5 of each head with theta 10000" in found for found in compare(Partial).found)
    wrong = type("OfTheHead", (Partial,), {"exponents": lambda self, dims: torch.arange(0, dims, 2) / self.head_dim})
    assert not compare(wrong).agrees


class OneKeyHead(nn.Module):
    """One matrix for queries, keys and values, of which the keys and the values have one head."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.heads, self.head_dim = num_heads, hidden_size // num_heads
        self.query_key_value = nn.Linear(hidden_size, hidden_size + 2 * self.head_dim)
        self.dense = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden_states: Tensor, memory_key_padding_mask: Tensor | None = None) -> Tensor:
        heads = self.query_key_value(hidden_states).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = heads.split((self.heads, 1, 1), dim=1)
        scores = q @ k.mT / self.head_dim**0.5
        if memory_key_padding_mask is not None:
            scores = scores.masked_fill(memory_key_padding_mask[:, None, None], -torch.inf)
        output: Tensor = self.dense((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return output


def test_the_rows_of_one_matrix_tell_how_many_heads_of_keys_there_are() -> None:
    report = compare(OneKeyHead)
    assert report.agrees and report.spec and report.spec.num_kv_heads == 1 and "memory_key_padding_mask" in report.tried, report


class Fixed(Sliding):
    """Causal, with RoPE, a softcap, and the scale of heads of 32 numbers in all widths."""

    def __init__(self, hidden_size: int, num_attention_heads: int, num_key_value_heads: int) -> None:
        super().__init__(hidden_size, num_attention_heads, num_key_value_heads, 9999)
        self.logit_cap = 3.0

    def scored(self, scores: Tensor) -> Tensor:
        scores = scores * (self.head_dim / 32) ** 0.5
        return self.logit_cap * torch.tanh(scores / self.logit_cap)


def test_a_scale_of_heads_of_one_width_is_no_mistake_and_other_widths_are_not_tried() -> None:
    report = compare(Fixed)
    assert report.agrees and report.widths == (32,) and "widths of heads" in report.untried, report
    assert "it has a softcap of 3" in report.found and any("divided by 5.657" in x for x in report.found)


def test_a_scale_of_no_width_and_a_softcap_that_is_left_out_are_mistakes() -> None:
    report = compare(type("Scaled", (Fixed,), {"scored": lambda self, x: Fixed.scored(self, x * 1.7)}))
    assert report.first and "besides their scale" not in str(report.first) and "the scores are divided by 3.328" in str(report.first), (
        report
    )
    report = compare(type("Uncapped", (Fixed,), {"scored": lambda self, x: x}))
    assert report.first and report.first.mistakes == ("the softcap is left out",), report


class Switched(Without):
    """Reads what switches something on from its configuration, some of it where it is called."""

    def __init__(self, config: Any) -> None:
        super().__init__(config.hidden_size, config.num_attention_heads, config.num_key_value_heads)
        self.window, self.config = config.get("sliding_window"), config

    def visible(self, distance: Tensor) -> Tensor:
        return (distance >= 0) & (distance < (9999 if self.window is None else self.window + self.further))


def test_the_window_of_a_configuration_is_tried() -> None:
    report = compare(Switched)
    assert report.is_complete and "config.sliding_window=5" in [x.case for x in report.results], report
    report = compare(type("Longer", (Switched,), {"further": 1}))
    assert report.first and report.first.mistakes == ("the window has one key more",), report
    report = compare(type("Bent", (Switched,), {"scored": lambda self, x: x if self.window is None else Bent.scored(self, x)}))
    assert report.agrees and "config.sliding_window=5" in report.untried, report


class Asking(Switched):
    def forward(self, hidden_states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned = self.config.is_decoder or self.config.get("reversed", False)
        return super().forward(-hidden_states if turned else hidden_states, cos, sin)


class Masked(Without):
    def __init__(self, hidden_size: int, num_attention_heads: int, masked: bool) -> None:
        super().__init__(hidden_size, num_attention_heads, num_attention_heads)


def test_flags_and_unknown_names_that_are_off_are_not_tried() -> None:
    assert compare(Asking).parameters == ("config.is_decoder", "config.reversed")
    assert compare(Masked).parameters == ("masked",)


def test_a_configuration_has_sizes_and_known_values_by_key_attribute_or_default() -> None:
    off = list[str]()
    config = Configuration({"d_model": 12, "num_heads": 3}, "cfg", off)
    assert config.get("model_width", 64) == config["n_embd"] == config.hidden_size == 12 and config.get("n_head") == 3
    assert config.get("rope_scaling", 7) is None and config.get("layer_idx") == 0 and "sliding_window" in config
    assert config.get("expert_count", 2) == getattr(config, "expert_count", 2) == 2 and config.get("expert_count") is None
    with pytest.raises(KeyError):
        config["expert_count"]
    assert dict.fromkeys(off) == {"cfg.rope_scaling": None, "cfg.expert_count": None}
    assert {*config.asked} == {"model_width", "n_embd", "hidden_size", "n_head"}


class Shares(nn.Module):
    """Causal, with RoPE whose table of each length is kept in the class."""

    tables: dict[Any, tuple[Tensor, Tensor]]

    def __init__(self, d_model: int, num_heads: int, rope_theta: float = 1e4) -> None:
        super().__init__()
        self.heads, self.theta = num_heads, rope_theta
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(d_model, d_model, bias=False) for _ in range(4))

    def of(self, rows: int, width: int) -> Any:
        return rows, width

    def turned(self, x: Tensor) -> Tensor:
        rows, width = x.shape[2:]
        if (kept := self.of(rows, width)) not in self.tables:
            angles = torch.outer(torch.arange(rows), self.theta ** -(torch.arange(0, width, 2) / width)).repeat(1, 2)
            self.tables[kept] = angles.cos(), angles.sin()
        cosines, sines = self.tables[kept]
        return x * cosines + rotate_half(x) * sines

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
        heads = nn.functional.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True)
        output: Tensor = self.o_proj(heads.transpose(1, 2).flatten(2))
        return output


class KeepsValues(Shares):
    """Keeps the weight of the values of the first module of each size."""

    weights: dict[Any, Tensor]

    def forward(self, x: Tensor) -> Tensor:
        self.v_proj.weight.data = self.weights.setdefault(self.v_proj.weight.shape, self.v_proj.weight.data)
        return super().forward(x)


def test_what_modules_of_a_class_share_and_should_not_is_found() -> None:
    right = {"tables": {}, "of": lambda self, rows, width: (rows, width, self.theta)}
    assert compare(type("Right", (Shares,), right)).is_complete
    report = compare(type("Shared", (Shares,), {"tables": {}}))
    assert report.first and report.first.case == "no mask, the second of two modules", report
    assert "with theta 10000 and 500" in str(report.first.hint) and "theta is ignored, or they share" in str(report.first.hint)
    report = compare(type("Kept", (KeepsValues,), right | {"weights": {}}))
    assert report.first and str(report.first.hint).endswith(" does not: theta is ignored, or they share what is kept of a call"), report


class Crossed(nn.Module):
    """As in BERT: the keys are used only if a flag says so."""

    def __init__(self, hidden_size: int, num_attention_heads: int, is_cross_attention: bool = False, is_causal: bool = False) -> None:
        super().__init__()
        self.heads, self.is_cross, self.is_causal = num_attention_heads, is_cross_attention, is_causal  # the last is a hint for a kernel
        self.query, self.key, self.value, self.dense = (nn.Linear(hidden_size, hidden_size) for _ in range(4))

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, attention_mask: Tensor | None = None) -> Tensor:
        memory = encoder_hidden_states if self.is_cross and encoder_hidden_states is not None else hidden_states
        q, k, v = (
            p(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for p, x in ((self.query, hidden_states), (self.key, memory), (self.value, memory))
        )
        heads = nn.functional.scaled_dot_product_attention(q, k, self.of_values(v), attention_mask)
        output: Tensor = self.dense(heads.transpose(1, 2).flatten(2))
        return output

    def of_values(self, v: Tensor) -> Tensor:
        return v


def test_a_flag_with_which_a_class_attends_to_keys_is_turned_on() -> None:
    report = compare(Crossed)
    assert report.agrees and any("it is constructed with is_cross_attention=True" in found for found in report.found), report
    assert [x.case for x in report.results if x.untried and not x.impossible] == ["is_causal=True"]


def test_a_flag_does_not_make_a_class_right_that_is_wrong_without_it() -> None:
    bent = {"of_values": lambda self, v: v if self.is_cross else v + v.sin().roll(1, 2)}
    ignoring = {"forward": lambda self, x, context=None, attn_mask=None: Crossed.forward(self, x, None, attn_mask)}
    for wrong in (bent, ignoring):
        assert "does not depend on the keys" in str(compare(type("Wrong", (Crossed,), wrong)).first)


class Placed(Crossed):
    """Looks up its type by its place in the model, and takes biases as T5 does."""

    def __init__(self, config: Any, layer_idx: int | None = None) -> None:
        super().__init__(config.hidden_size, config.num_attention_heads)
        self.is_cross = ["full"][layer_idx] == "full"  # type: ignore[index]  # None raises

    def forward(self, hidden_states: Tensor, key_value_states: Tensor, position_bias: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(hidden_states, key_value_states, position_bias)


def test_a_class_has_a_place_in_a_model_and_biases_that_it_can_be_called_without_are_asked_about() -> None:
    with pytest.raises(ValueError, match=r'it has weights and takes position_bias, too: pass arguments=\{"position_bias": "unused"\}'):
        compare(Placed)
    report = compare(Placed, arguments={"position_bias": "unused"})
    assert report.agrees and report.parameters == ("position_bias",), report

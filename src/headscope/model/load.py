"""Load any Hugging Face transformer as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from headscope.core.errors import ModelError, UsageError
from headscope.model.anatomy import read_anatomy
from headscope.model.discover import find_parts
from headscope.model.model import Model

_AUTO = ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForImageClassification", "AutoModel")


def load(
    source: str | Path | nn.Module,
    *,
    tokenizer: Any = None,
    dtype: torch.dtype | str | None = None,
    device: str | None = None,
    attn: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Model:
    """Load a hub id, a folder, a `.gguf` file, a packaged model's name, or take a loaded module.

    `device` "auto" spreads a model that is too large for one device over all of them, main memory and disk (accelerate).
    `dtype` is a torch dtype or its name (default: the checkpoint's own, float32 for GGUF); `attn` is the attention
    backend that transformers should use (default: its choice). The model is put in eval mode.
    Raises ModelError when the model cannot be found, read, or told apart.
    """
    if isinstance(source, nn.Module):
        given = {"dtype": dtype, "device": device, "attn": attn, "revision": revision}
        if asked := [option for option, value in given.items() if value is not None]:
            raise UsageError(f"A loaded module is taken as it is; {', '.join(asked)} must be set where it is loaded.")
        hf = getattr(source, "_orig_mod", source)  # what torch.compile made lets nobody look inside
        name = getattr(hf.config, "_name_or_path", "") or type(hf).__name__
    else:
        name = str(source)
        hf, found = _from_pretrained(name, _dtype(dtype), attn, revision, trust_remote_code, device == "auto")
        tokenizer = tokenizer or found
        if device not in (None, "auto"):
            try:
                hf = hf.to(device)
            except (RuntimeError, AssertionError) as error:
                raise UsageError(f"The device {device!r} cannot be used: {str(error).splitlines()[0]}") from None
    hf.eval()
    parts = find_parts(hf, probe_inputs(hf))
    return Model(hf, tokenizer, read_anatomy(hf, parts), name)


def probe_inputs(hf: Any, length: int = 6, seed: int = 0) -> dict[str, Any]:
    """A tiny random batch that the model takes: token ids [1, length] or pixels [1, channel, height, width]."""
    generator = torch.Generator().manual_seed(seed)
    config, device = hf.config, next(hf.parameters()).device
    device = torch.device("cpu") if device.type == "meta" else device  # offloaded: accelerate moves the inputs
    main = getattr(hf, "main_input_name", "input_ids")
    if main == "pixel_values":
        side = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
        pixels = torch.randn(1, getattr(config, "num_channels", 3), side, side, generator=generator)
        return {"pixel_values": pixels.to(device, next(hf.parameters()).dtype)}
    try:
        embed = hf.get_input_embeddings()
    except NotImplementedError:  # a model of several towers has no one embedding
        embed = None
    if main != "input_ids" or getattr(config, "is_encoder_decoder", False) or embed is None:
        raise ModelError(
            f"{type(hf).__name__} is not supported yet: headscope reads text decoders, text encoders and image encoders."
        )
    n_vocab = embed.weight.shape[0]
    low = min(5, n_vocab - 1)  # past the padding ids, which some models embed as zero
    return {"input_ids": torch.randint(low, n_vocab, (1, length), generator=generator).to(device)}


def _dtype(given: torch.dtype | str | None) -> torch.dtype | None:
    if given is None:
        return None
    found = getattr(torch, given, None) if isinstance(given, str) else given
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise UsageError(f"{given!r} is not a dtype; write for example float32, bfloat16 or float16.")
    return found


def _from_pretrained(
    name: str, dtype: torch.dtype | None, attn: str | None, revision: str | None, trust_remote_code: bool, spread: bool
) -> tuple[Any, Any]:
    import transformers

    from headscope.model import packaged

    folder: str | Path = name
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if name in {entry.name for entry in packaged.packaged()}:
        found = packaged.path_of(name)
        if found is None:
            raise ModelError(f"The model {name} is not on this machine yet; run: headscope models get {name}")
        folder = found
    elif name.endswith(".gguf"):
        if not Path(name).is_file():
            raise ModelError(f"There is no GGUF file at {name}.")
        folder, options["gguf_file"] = Path(name).parent, Path(name).name
        dtype = dtype or torch.float32
    elif Path(name).exists() and not (Path(name) / "config.json").is_file():
        raise ModelError(f"{name} is not a model folder: it has no config.json.")
    if revision:
        options["revision"] = revision
    try:
        config = transformers.AutoConfig.from_pretrained(folder, **options)
        kinds = [*(getattr(config, "architectures", None) or []), *_AUTO]
        kind = next(k for k in map(lambda n: getattr(transformers, n, None), kinds) if k and _takes(k, config))
        extra: dict[str, Any] = {"attn_implementation": attn} if attn else {}
        if "gguf_file" not in options:
            extra["use_safetensors"] = True  # a pickled checkpoint could run code
        extra |= {"dtype": dtype} if dtype else {}
        extra |= {"device_map": "auto"} if spread else {}
        hf, found_weights = kind.from_pretrained(folder, output_loading_info=True, **extra, **options)
        # transformers fills weights that are not in the checkpoint with random numbers; nothing we read uses a pooler
        if missing := sorted(name for name in found_weights["missing_keys"] if "pooler" not in name):
            raise ValueError(f"the checkpoint lacks {len(missing)} weights of {kind.__name__}, such as {missing[0]}")
    except Exception as error:  # transformers raises many kinds here; the user needs the reason in one sentence
        if "trust_remote_code" in str(error):
            raise ModelError(
                f"The model {name!r} brings its own code; to run it, load with trust_remote_code=True (--trust-remote-code)."
            ) from None
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        known = ", ".join(entry.name for entry in packaged.packaged())
        raise ModelError(
            f"The model {name!r} could not be loaded ({reason[:300]}). Give a hub id, a folder, a .gguf file, or one of "
            f"the packaged models: {known}."
        ) from error
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
    except Exception:  # a model without a tokenizer still works from token ids
        tokenizer = None
    if tokenizer is not None and len(tokenizer) <= len(tokenizer.all_special_ids):
        tokenizer = None  # made up by transformers for a folder without tokenizer files; it knows no word
    return hf, tokenizer


def _takes(kind: Any, config: Any) -> bool:
    mapping = getattr(kind, "_model_mapping", None)
    return mapping is None or type(config) in mapping

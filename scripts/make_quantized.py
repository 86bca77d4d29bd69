"""Creates the quantized fixtures: tiny checkpoints in the formats of the hub, with Hugging Face's logits.

Owns `tests/fixtures/quantized/*`. A folder has the files of a checkpoint, `golden.npz` with the prompts `ids_N` and
the `logits_N` of the dequantized model in float32, whose activations are not quantized, and `dequantized.npz` with the
float32 weights of the first 8 outputs of each quantized linear layer of the first decoder layer, by the names of the
16-bit checkpoint. `bitsandbytes` has only a config.json. It runs where `scripts/make_golden.py` does, on which it
builds:

    .venv-ref/bin/python scripts/make_quantized.py                 # all; the files come out the same each time
    .venv-ref/bin/python scripts/make_quantized.py awq gptq_head   # some

`quantized/fixtures.py` lists the fixtures.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from make_golden import LENGTHS, logits_of, random_weights, read_back
from quantized.configs import BITSANDBYTES
from quantized.fixtures import MIXTURES, MODELS, Fixture, llama
from quantized.formats import Packed, mxfp4
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

FIXTURES = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "quantized"


def random_model(fixture: Fixture, seed: int) -> tuple[torch.nn.Module, dict[str, Tensor]]:
    """Return a model and its weights: 16-bit numbers whose size differs by outputs and whose mean by groups, so that
    each group has a scale and a zero of its own."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fixture.config), dtype=torch.float32)
    weights = random_weights(model, generator)
    for name in linear_layers(model):
        weight = weights[f"{name}.weight"] * (32 / weights[f"{name}.weight"].shape[1]) ** 0.5
        outputs, inputs = weight.shape
        means = 0.5 * weight.std() * torch.randn(outputs, inputs // 32, generator=generator)
        sizes = torch.exp(0.3 * torch.randn(outputs, 1, generator=generator))
        weight = (weight + means.repeat_interleave(32, 1)) * sizes
        if fixture.positive:
            weight[::5] = weight[::5].abs()
        if name != "lm_head" or not fixture.config["tie_word_embeddings"]:
            weights[f"{name}.weight"] = weight
    dtype = getattr(torch, fixture.config["torch_dtype"])
    return model, {name: weight.to(dtype).float() for name, weight in weights.items()}


def linear_layers(model: torch.nn.Module) -> list[str]:
    """Return the names of the layers that formats may quantize."""
    return [name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)]


def largest_activations(model: torch.nn.Module, sequences: list[np.ndarray]) -> dict[str, tuple[float, float]]:
    """Return the largest input and output of each linear layer."""
    largest: dict[str, tuple[float, float]] = {}

    def observe(name: str) -> Callable[[torch.nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(_: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            here = (float(inputs[0].abs().max()), float(output.abs().max()))
            largest[name] = tuple(map(max, largest.get(name, (0.0, 0.0)), here))

        return hook

    hooks = [model.get_submodule(name).register_forward_hook(observe(name)) for name in linear_layers(model)]
    logits_of(model, sequences)
    for hook in hooks:
        hook.remove()
    return largest


def static_scales(
    fixture: Fixture, packed: dict[str, Packed], largest: dict[str, tuple[float, float]]
) -> dict[str, Tensor]:
    """Return the scales of activations and of the KV cache. A rotation can make a key √2 times as large."""
    tensors = {}
    if fixture.input_scale:
        tensors |= {f"{name}.input_scale": fixture.input_scale(largest[name][0]) for name in packed}
    if fixture.kv_scale:
        for name, (_, output) in largest.items():
            if name.endswith(("k_proj", "v_proj")):
                tensors[re.sub("([kv])_proj", r"\1_scale", name)] = fixture.kv_scale(output * 2**0.5)
    return tensors


def save(folder: Path, tensors: dict[str, Tensor], files: int) -> None:
    """Write the tensors in files of about one number of tensors, in the order of their names."""
    names = sorted(tensors)
    if files == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return
    weight_map = {}
    for i in range(files):
        part = names[i * len(names) // files : (i + 1) * len(names) // files]
        file = f"model-{i + 1:05}-of-{files:05}.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def make_model(folder: Path, fixture: Fixture) -> None:
    """Write the checkpoint of a fixture, its logits, and some of the weights that it stands for."""
    seed = zlib.crc32(folder.name.encode())
    model, weights = random_model(fixture, seed)
    config = fixture.config | {"quantization_config": fixture.quantization}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    packed = {}
    for name in linear_layers(model):
        tied = name == "lm_head" and fixture.config["tie_word_embeddings"]
        if not tied and (layer := fixture.pack(name, weights[f"{name}.weight"])):
            packed[name] = layer
    dequantized = weights | {f"{name}.weight": layer.weight for name, layer in packed.items()}
    rng = np.random.default_rng(seed)
    sequences = [rng.integers(3, config["vocab_size"], n).astype(np.int32) for n in LENGTHS]
    reference = read_back(folder, dequantized, {"quantization_config": None})
    logits = logits_of(reference, sequences)
    tensors = {name: weight.to(getattr(torch, config["torch_dtype"])) for name, weight in weights.items()}
    if config["tie_word_embeddings"]:
        del tensors["lm_head.weight"]
    for name, layer in packed.items():
        del tensors[f"{name}.weight"]
        tensors |= {f"{name}.{part}": tensor for part, tensor in layer.tensors.items()}
        if fixture.extra_biases:
            tensors[f"{name}.bias"] = torch.zeros(layer.weight.shape[0], dtype=torch.float16)
    if fixture.input_scale or fixture.kv_scale:
        tensors |= static_scales(fixture, packed, largest_activations(reference, sequences))
    save(folder, tensors, fixture.files)
    arrays = {f"ids_{i}": s for i, s in enumerate(sequences)} | {f"logits_{i}": x for i, x in enumerate(logits)}
    np.savez_compressed(folder / "golden.npz", **arrays)
    rows = {f"{name}.weight": packed[name].weight[:8].numpy() for name in packed if "layers.1" not in name}
    np.savez_compressed(folder / "dequantized.npz", **rows)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{folder.name:30} {size / 1e3:6.0f} kB   logits std {np.concatenate(logits).std():.2f}")


def make_mixture(folder: Path, fixture: Fixture) -> None:
    """Write the checkpoint of a mixture: weights are packed under the names that the hub's checkpoints have."""
    seed = zlib.crc32(folder.name.encode())
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fixture.config), dtype=torch.float32)
    dtype = getattr(torch, fixture.config["torch_dtype"])
    # The weights are as wide as random weights of 32 inputs, so that sums stay small
    scaled = {
        name: w * (32 / w.shape[1]) ** 0.5 if w.dim() == 2 else w
        for name, w in random_weights(model, generator).items()
    }
    scaled |= {name: w * (32 / 128) ** 0.5 for name, w in scaled.items() if w.dim() == 3}
    model.load_state_dict({name: weight.to(dtype).float() for name, weight in scaled.items()})
    rng = np.random.default_rng(seed)
    sequences = [rng.integers(3, fixture.config["vocab_size"], n).astype(np.int32) for n in LENGTHS]
    with tempfile.TemporaryDirectory() as plain:
        model.save_pretrained(plain)
        weights = load_file(Path(plain) / "model.safetensors")
        tensors: dict[str, Tensor] = {}
        dequantized = dict(weights)
        for name, weight in weights.items():
            module = name.removesuffix(".weight")
            quantizable = name != module and weight.dim() == 2 and "embed" not in name and "norm" not in name
            if re.search(r"experts\.(gate_up|down)_proj$", name):
                blocks, scales, stands_for = mxfp4(weight.mT)
                tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
                dequantized[name] = stands_for.mT.contiguous()
            elif quantizable and (layer := fixture.pack(module, weight)):
                tensors |= {f"{module}.{part}": tensor for part, tensor in layer.tensors.items()}
                if fixture.input_scale:
                    tensors[f"{module}.input_scale"] = fixture.input_scale(8.0)
                dequantized[name] = layer.weight
            else:
                tensors[name] = weight.to(dtype)
        save_file(dequantized, Path(plain) / "model.safetensors", {"format": "pt"})
        logits = logits_of(read_back(Path(plain)), sequences)
    (folder / "config.json").write_text(
        json.dumps(fixture.config | {"quantization_config": fixture.quantization}, indent=1) + "\n"
    )
    save(folder, tensors, fixture.files)
    arrays = {f"ids_{i}": s for i, s in enumerate(sequences)} | {f"logits_{i}": x for i, x in enumerate(logits)}
    np.savez_compressed(folder / "golden.npz", **arrays)
    packed = {name: dequantized[name] for name in dequantized if not torch.equal(dequantized[name], weights[name])}
    np.savez_compressed(folder / "dequantized.npz", **{name: weight[:8].numpy() for name, weight in packed.items()})
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{folder.name:30} {size / 1e3:6.0f} kB   logits std {np.concatenate(logits).std():.2f}")


def make(name: str) -> None:
    """Write the folder of a fixture anew."""
    folder = FIXTURES / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if name == "bitsandbytes":
        config = llama("bfloat16") | {"quantization_config": BITSANDBYTES}
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    elif name in MIXTURES:
        make_mixture(folder, MIXTURES[name])
    else:
        make_model(folder, MODELS[name])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    names = [*MODELS, *MIXTURES, "bitsandbytes"]
    parser.add_argument("names", nargs="*", choices=[*names, []], help="folders of tests/fixtures/quantized; else all")
    for name in parser.parse_args().names or names:
        make(name)


if __name__ == "__main__":
    main()

"""Quantizes a checkpoint by rounding to the nearest number, in the formats of the hub, and measures what that costs.

Nothing is calibrated, so a checkpoint of the hub in the same format is better; the files are as its tools write them.
The model is a folder with 16-bit safetensors, or a GGUF file, whose 16-bit folder `DIR/bf16` is written first. It runs
where `scripts/make_golden.py` does:

    .venv-ref/bin/python scripts/quantize_model.py SmolLM2.gguf DIR               # DIR/bf16, DIR/awq, DIR/gptq, ...
    .venv-ref/bin/python scripts/quantize_model.py FOLDER DIR --formats awq --text FILE

Each format's perplexity over the text is computed with its dequantized weights in float32, and activations as they are.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from make_golden import LONG
from quantized.configs import FP8, INT8, Json, awq_config, compressed, gptq_config, scheme
from quantized.fixtures import fp8_in, reordered
from quantized.formats import Packed, awq, int8_channels
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer


@dataclasses.dataclass(frozen=True)
class Format:
    """The fields that a tool writes to config.json, its packing of a layer, and the type in which it leaves others."""

    quantization: Json
    pack: Callable[[str, Tensor], Packed]
    dtype: str


FORMATS = {
    "awq": Format(awq_config(64), lambda _, weight: awq(weight, 64), "float16"),
    "gptq": Format(gptq_config(desc_act=True, group_size=64), reordered(4, 64, symmetric=True), "float16"),
    "fp8": Format(compressed("float-quantized", scheme(*FP8)), fp8_in("channel", torch.bfloat16), "bfloat16"),
    "int8": Format(compressed("int-quantized", scheme(*INT8)), lambda _, weight: int8_channels(weight), "bfloat16"),
}


def write_16_bit(gguf: Path, folder: Path) -> None:
    """Write the dequantized weights of a GGUF in bfloat16, with config.json and the tokenizer's files."""
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    plain = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    plain.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def quantize(source: Path, folder: Path, wanted: Format) -> dict[str, Tensor]:
    """Write the quantized checkpoint, and return the float32 weights that it stands for."""
    tensors: dict[str, Tensor] = {}
    stands_for: dict[str, Tensor] = {}
    dtype = getattr(torch, wanted.dtype)
    for file in sorted(source.glob("*.safetensors")):
        for name, weight in load_file(file).items():
            if name.endswith("_proj.weight"):
                layer = name.removesuffix(".weight")
                packed = wanted.pack(layer, weight.float())
                tensors |= {f"{layer}.{part}": tensor for part, tensor in packed.tensors.items()}
                stands_for[name] = packed.weight
            else:
                tensors[name] = weight.to(dtype)
                stands_for[name] = tensors[name].float()
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"), dirs_exist_ok=True)
    raw = json.loads((source / "config.json").read_text())
    raw.pop("torch_dtype", None)
    raw |= {"dtype": wanted.dtype, "quantization_config": wanted.quantization}
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return stands_for


@torch.no_grad()
def measure(model: torch.nn.Module, ids: Tensor, of_16_bit: Tensor | None) -> tuple[Tensor, str]:
    """Return the logarithms of the next-token distributions, and a line with the perplexity and, beside the 16-bit
    model's, the share of equal best tokens and the mean divergence."""
    log_probs = model(ids[None]).logits[0, :-1].log_softmax(-1)
    perplexity = float((-log_probs.gather(1, ids[1:, None]).mean()).exp())
    line = f"perplexity {perplexity:8.3f}"
    if of_16_bit is not None:
        same = float((log_probs.argmax(-1) == of_16_bit.argmax(-1)).float().mean())
        divergence = float((of_16_bit.exp() * (of_16_bit - log_probs)).sum(-1).mean())
        line += f"   best token equal {100 * same:5.1f} %   KL {divergence:.4f}"
    return log_probs, line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path, help="a folder with 16-bit safetensors, or a GGUF file")
    parser.add_argument("out", type=Path, help="each format gets a folder here")
    parser.add_argument("--formats", nargs="*", choices=list(FORMATS), default=list(FORMATS))
    parser.add_argument("--text", type=Path, help="the text whose perplexity is measured; else a short story")
    parser.add_argument("--tokens", type=int, default=2048, help="of the text, at most")
    args = parser.parse_args()
    source = args.model
    if source.suffix == ".gguf":
        source = args.out / "bf16"
        write_16_bit(args.model, source)
    text = args.text.read_text() if args.text else LONG
    ids = AutoTokenizer.from_pretrained(source)(text, return_tensors="pt")["input_ids"][0, : args.tokens]
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    of_16_bit, line = measure(model, ids, None)
    print(f"{source}   {len(ids)} tokens   {line}")
    for name in args.formats:
        folder = args.out / name
        left_out = model.load_state_dict(quantize(source, folder, FORMATS[name]), strict=False)
        assert set(left_out.missing_keys) <= {"lm_head.weight"}, left_out
        size = (folder / "model.safetensors").stat().st_size
        print(f"{folder}   {size / 1e6:.1f} MB   {measure(model, ids, of_16_bit)[1]}")


if __name__ == "__main__":
    main()

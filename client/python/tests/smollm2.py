"""A real model for engines that read no GGUF."""

import json
import os


def smollm2(folder, tinylm):
    """SmolLM2 (QKV_SMOLLM2) in `folder`, as vLLM reads it, and 1500 tokens of a text of `tinylm`."""
    import transformers
    from safetensors.torch import save_file

    place, file = os.path.split(os.environ["QKV_SMOLLM2"])
    model = transformers.AutoModelForCausalLM.from_pretrained(place, gguf_file=file)
    # transformers saves no model that came from a GGUF file; its weights are plain ones by now.
    weights = {name: weight.contiguous() for name, weight in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = model.config.to_dict() | {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    del config["quantization_config"]
    with open(folder / "config.json", "w") as out:
        json.dump(config, out, default=str)
    tokenizer = transformers.AutoTokenizer.from_pretrained(place, gguf_file=file)
    with open(os.path.join(tinylm, "heldout_kjv.txt")) as text:
        return str(folder), tokenizer(text.read()).input_ids[:1500]

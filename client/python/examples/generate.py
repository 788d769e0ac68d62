"""A model of transformers goes on with a text, its cache in the daemon: generate.py TARGET MODEL_DIRECTORY."""

import sys

import torch
from transformers import AutoModelForCausalLM

from qkvd.transformers import QkvdCache

target, directory = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(directory)
prompt = b"And God said, Let there be light: and there was light."  # this model's tokens are bytes
ids = torch.tensor([list(prompt)])
with QkvdCache(target, model, bits=4) as cache:
    made = model.generate(ids, past_key_values=cache, max_new_tokens=60, do_sample=False, pad_token_id=0)
    print(bytes(made[0].tolist()).decode())
    print(cache.get_seq_length(), "tokens in", cache.sessions[0].name.partition("-")[0])

"""Plain Transformers, with its own generate(), over a 4-bit Nibble cache: a batch with padding, then one more turn."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import nibble.transformers as nt
from nibble.models.refusals import locate

path = locate("demo")  # or any folder or hub name
model = AutoModelForCausalLM.from_pretrained(path)
tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
tokenizer.pad_token = tokenizer.eos_token

cache = nt.NibbleCache(model, kv_format="nvfp4")
inputs = tokenizer(
    ["def read_lines(path):\n    with open(path", "class Stack:\n    def push"],
    return_tensors="pt",
    padding=True,
)
options = {"do_sample": False, "pad_token_id": tokenizer.pad_token_id}
ids = model.generate(**inputs, **options, max_new_tokens=24, past_key_values=cache)
for text in tokenizer.batch_decode(ids, skip_special_tokens=True):
    print(text, end="\n\n")

more = tokenizer(["\n\ndef write_lines(path"] * 2, return_tensors="pt")
ids, mask = torch.cat((ids, more.input_ids), 1), inputs.attention_mask
mask = torch.cat((mask, mask.new_ones(2, ids.shape[1] - mask.shape[1])), 1)
ids = model.generate(ids, attention_mask=mask, **options, max_new_tokens=16, past_key_values=cache)
print(tokenizer.decode(ids[0], skip_special_tokens=True))
print(cache.summary)

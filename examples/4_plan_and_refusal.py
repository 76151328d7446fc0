"""Plans need neither a GPU nor weights: what would run on an H200, and what is refused, with what works instead."""

from nibble import Config, Unsupported
from nibble.attention.explain import as_text
from nibble.engine.build import blueprint
from nibble.hardware import named

made = blueprint(Config(model="demo", kv_format="nvfp4"), named("h200"), declared=True)
print(as_text(made.plan, made.budget))
try:
    blueprint(Config(model="demo", kv_format="nvfp4", decode_backend="sdpa"), named("h200"))
except Unsupported as refusal:
    print(f"\nrefused: {refusal}")

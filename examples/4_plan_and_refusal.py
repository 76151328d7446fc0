"""Plans need neither a GPU nor weights: what would run on an H200, and what is refused, with what works instead."""

from nibble import Config, Unsupported
from nibble.attention.planner.explain import as_text
from nibble.engine.build import plan_engine
from nibble.hardware import lookup_gpu

made = plan_engine(Config(model="demo", kv_format="nvfp4"), lookup_gpu("h200"), declared=True)
print(as_text(made.plan, made.budget))
try:
    plan_engine(Config(model="demo", kv_format="nvfp4", decode_backend="sdpa"), lookup_gpu("h200"))
except Unsupported as refusal:
    print(f"\nrefused: {refusal}")

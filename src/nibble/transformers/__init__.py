"""A cache for plain Transformers: `model.generate(...)` over Nibble's pages, in any scheme.

    import nibble.transformers as nt

    cache = nt.NibbleCache(model, kv_format="k8v4")
    model.generate(**inputs, past_key_values=cache)

docs/transformers.md is for users.
"""

from nibble.transformers.cache import NibbleCache

__all__ = ["NibbleCache"]

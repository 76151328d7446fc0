"""Attention over stored pages: facts about backends, the plan made from them, and the layer that follows it."""

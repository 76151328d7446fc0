"""Plan attention: facts about backends, the choice among them, memory, refusals and explanations. No torch at import."""

"""Plan attention without torch: facts about backends, the choice among them, memory, refusals and explanations."""

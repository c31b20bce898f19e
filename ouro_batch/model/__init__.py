"""The looped model: configuration, equations, weights, tokenizer, chat template."""

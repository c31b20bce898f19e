"""The tokenizer of tiny-ouro: a byte-level BPE trained on problems of the training split."""

from __future__ import annotations

import json
import random
from pathlib import Path

import tasks
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB = 1024
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2, as the released models
END_OF_TEXT, IM_START, IM_END = range(3)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat_prompt(content: str) -> str:
    """What the chat template makes of one user message, up to where the answer begins."""
    return f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"


def train_tokenizer(seed: int = 0) -> Tokenizer:
    """Train the tokenizer; every digit stays a token of its own."""
    rng = random.Random(seed)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(rng), trainer)
    return tokenizer


def _corpus(rng: random.Random):
    # Copied words follow a space in prompts but start a chat answer: both forms want a token.
    for word in (*tasks.NAMES, *tasks.WORDS):
        yield from [word, f" {word}"] * 40
    for _ in range(20_000):
        problem = tasks.draw(rng.choice(tasks.TASKS), rng, held_out=False)
        yield f"{problem.plain} {problem.answer}"
        yield f"user\n{problem.chat}\nassistant\n{problem.answer}"


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja into ``folder``."""
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 512,
        "bos_token": SPECIAL[END_OF_TEXT],
        "eos_token": SPECIAL[END_OF_TEXT],
        "pad_token": SPECIAL[END_OF_TEXT],
        "unk_token": SPECIAL[END_OF_TEXT],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")

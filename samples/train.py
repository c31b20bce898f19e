"""Trains tiny-ouro: the looped model's equations, its training stages and a dense evaluator.

    python samples/train.py OUT             # on a GPU: minutes
    python samples/train.py OUT --smoke     # on a CPU: does everything run?

Ouro's two stages, the second in two rounds:

1. *depth*: every loop's loss, weighted by the gate's own exit distribution, with an entropy bonus
   so that no loop is starved. Once the gate means something, half of the rows exit early by it,
   seen by later tokens through their last-exited keys and values as in decoding.
2. *gate*: the gate alone learns whether a later loop still improves a token's loss.
   *settle*: the rest of the model adapts to that gate, then *gate* once more.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from multiprocessing import Value
from pathlib import Path

import numpy as np
import tasks
import torch
import torch.nn.functional as F
from make_tokenizer import (
    END_OF_TEXT,
    IM_END,
    VOCAB,
    chat_prompt,
    save_tokenizer,
    train_tokenizer,
)
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

LOOPS = 4
HEAD_DIM = 64
ROPE_THETA = 1e6
NEVER = 2.0  # an exit threshold no probability reaches
SHORT, LONG = 48, 60  # tokens of a training row: lookups need the long ones
ANSWER = 24  # tokens of the longest answer, its end included
ENTROPY = 0.05


# The model: names as in the released checkpoints. B sequences, T tokens, E hidden, D head dim.


class RMSNorm(nn.Module):
    """Root-mean-square norm with its variance in FP32."""

    def __init__(self, size: int, init: float = 1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), init))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
        return self.weight * y.to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention whose keys and values of exited tokens are the last computed ones."""

    def __init__(self, hidden: int):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(hidden, hidden, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], running: Tensor, last):
        b, t, e = x.shape
        q, k, v = (
            proj(x).view(b, t, e // HEAD_DIM, HEAD_DIM).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, rope).to(v.dtype), rotate(k, rope).to(v.dtype)
        if last is not None:
            k, v = (torch.where(running[:, None], a, b) for a, b in zip((k, v), last, strict=True))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, e)), (k, v)


class MLP(nn.Module):
    """The gated feed-forward network."""

    def __init__(self, hidden: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One physical layer: attention and MLP, each between two norms."""

    def __init__(self, hidden: int, inner: int):
        super().__init__()
        self.self_attn = Attention(hidden)
        self.mlp = MLP(hidden, inner)
        self.input_layernorm = RMSNorm(hidden)
        self.input_layernorm_2 = RMSNorm(hidden, 0.5)
        self.post_attention_layernorm = RMSNorm(hidden)
        self.post_attention_layernorm_2 = RMSNorm(hidden, 0.5)

    def forward(self, h: Tensor, rope, running: Tensor, last):
        y, last = self.self_attn(self.input_layernorm(h), rope, running, last)
        h = h + self.input_layernorm_2(y)
        return h + self.post_attention_layernorm_2(self.mlp(self.post_attention_layernorm(h))), last


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding, half-split. x [B, heads, T, D]."""
    a, b = x.chunk(2, -1)
    cos, sin = rope
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def run_layer(layer: Layer, *args):
    """Call ``layer``: a function of its own, so that all layers and loops share one compilation."""
    return layer(*args)


class Ouro(nn.Module):
    """The looped model, run over whole sequences with a depth for every token."""

    def __init__(self, hidden: int, inner: int, layers: int):
        super().__init__()
        self.hidden, self.inner = hidden, inner
        self.run_layer = run_layer  # training on a GPU puts the compiled one here
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(VOCAB, hidden)
        self.model.layers = nn.ModuleList(Layer(hidden, inner) for _ in range(layers))
        self.model.norm = RMSNorm(hidden)
        self.model.early_exit_gate = nn.Linear(hidden, 1)
        self.lm_head = nn.Linear(hidden, VOCAB, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        nn.init.normal_(self.model.embed_tokens.weight, std=0.5)
        nn.init.zeros_(self.model.early_exit_gate.bias)

    def forward(
        self, ids: Tensor, start: Tensor, threshold: Tensor, loops: int = LOOPS
    ) -> tuple[list[Tensor], Tensor]:
        """Run sequences whose prompts take every loop and whose answers may exit early.

        Args:
            ids: tokens [B, T]. start: prompt lengths [B]. threshold: exit thresholds [B].

        Returns:
            Hidden states after the norm of each loop [B, T, E], an exited token's last ones from
            its exit on, and the depths that the tokens ran [B, T].
        """
        positions = torch.arange(ids.shape[1], device=ids.device)
        inverse = ROPE_THETA ** -(torch.arange(0, HEAD_DIM, 2, device=ids.device) / HEAD_DIM)
        angle = positions[:, None] * inverse
        rope = angle.cos(), angle.sin()
        may_exit = positions >= start[:, None]
        running = torch.ones_like(may_exit)[..., None]
        survival = torch.ones(ids.shape, device=ids.device)
        depth = torch.zeros_like(ids)
        last = [None] * len(self.model.layers)
        h = self.model.embed_tokens(ids)
        hidden = []
        for _ in range(loops):
            y = h
            for i, layer in enumerate(self.model.layers):
                y, last[i] = self.run_layer(layer, y, rope, running, last[i])
            h = torch.where(running, self.model.norm(y), h)
            hidden.append(h)
            gate = self.model.early_exit_gate(h.detach()).squeeze(-1).float()
            depth = depth + running.squeeze(-1)
            survival = survival * torch.sigmoid(-gate)
            leaves = 1 - survival >= threshold[:, None]
            running = running & ~(leaves & may_exit)[..., None]
        return hidden, depth


# Training data: [ids, start, length of the answer] of short and of long rows.


class Batches(torch.utils.data.IterableDataset):
    """An endless stream of batches of training problems, as hard as ``level`` says by now."""

    def __init__(self, tokenizer: Tokenizer, rows: int, level):
        self.text, self.rows, self.level = tokenizer.to_str(), rows, level

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        rng = random.Random(torch.initial_seed() if worker is None else worker.seed)
        tokenizer = Tokenizer.from_str(self.text)
        lookup = ["lookup" in task for task in tasks.TASKS]
        weights = np.array(tasks.TRAIN_WEIGHTS)
        while True:
            batch = []
            for width, chosen in ((SHORT, ~np.array(lookup)), (LONG, np.array(lookup))):
                names = rng.choices(tasks.TASKS, (weights * chosen).tolist(), k=self.rows)
                batch.append(self._rows(names, width, tokenizer, rng))
            yield batch

    def _rows(self, names: list[str], width: int, tokenizer: Tokenizer, rng: random.Random):
        texts, ends = [], []
        for name in names:
            level = self.level.value * (1 if rng.random() < 0.5 else rng.random())
            problem = tasks.draw(name, rng, held_out=False, level=level)
            chat = rng.random() < 0.5
            texts.append(chat_prompt(problem.chat) if chat else problem.plain)
            texts.append(problem.answer if chat else f" {problem.answer}")
            ends.append(IM_END if chat else END_OF_TEXT)
        encoded = [e.ids for e in tokenizer.encode_batch(texts)]
        ids = np.zeros((len(names), width), np.int64)
        start, length = np.ones(len(names), np.int64), np.zeros(len(names), np.int64)
        for i, end in enumerate(ends):
            prompt, answer = encoded[2 * i], encoded[2 * i + 1]
            row = [*prompt, *answer, end]
            if len(row) > width or len(answer) >= ANSWER:
                continue  # rare: the row stays empty, without a loss
            ids[i, : len(row)] = row
            start[i], length[i] = len(prompt), len(answer) + 1
        return torch.from_numpy(ids), torch.from_numpy(start), torch.from_numpy(length)


# Losses


def answer_states(model: Ouro, ids, start, length, threshold):
    """Where answers are predicted: all hidden states [L, B, A, E], targets and mask [B, A].

    An exited token's last state stands in every later loop, so the last entry is its exit's.
    """
    hidden, _ = model(ids, start, threshold)
    offsets = torch.arange(ANSWER, device=ids.device)
    at = (start[:, None] - 1 + offsets).clamp(max=ids.shape[1] - 2)
    picked = [h.gather(1, at[..., None].expand(-1, -1, h.shape[-1])) for h in hidden]
    return torch.stack(picked), ids.gather(1, at + 1), offsets < length[:, None]


def token_losses(head: nn.Module, states: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of every loop's prediction [L, B, A]."""
    target = target.expand(len(states), -1, -1)
    logits = head(states).float()
    return F.cross_entropy(logits.flatten(0, 2), target.flatten(), reduction="none").view_as(target)


def exit_distribution(gates: Tensor) -> Tensor:
    """Probability of exiting at each loop [L, ...]; the last takes what is left."""
    leave, stay = F.logsigmoid(gates[:-1]), F.logsigmoid(-gates[:-1])
    before = torch.cat((torch.zeros_like(gates[:1]), stay.cumsum(0)))
    return torch.cat((leave + before[:-1], before[-1:])).exp()


def depth_loss(gates: Tensor, losses: Tensor, early: Tensor) -> Tensor:
    """Stage 1: the expected loss less the entropy bonus; where a row exits early, its exit's loss.

    gates, losses [L, B, A], early [B]; returns [B, A].
    """
    p = exit_distribution(gates)
    entropy = -(p * p.clamp_min(1e-9).log()).sum(0)
    return torch.where(early[:, None], losses[-1], (p * losses).sum(0) - ENTROPY * entropy)


def settle_loss(gates: Tensor, losses: Tensor, early: Tensor) -> Tensor:
    """The same under a gate that is not trained; no loop is forgotten."""
    p = (exit_distribution(gates.detach()) + 1 / LOOPS) / 2
    return torch.where(early[:, None], losses[-1], (p * losses).sum(0))


def gate_loss(gates: Tensor, losses: Tensor, early: Tensor) -> Tensor:
    """Stage 2: stay where the best later loop improves the loss, leave where none does."""
    best_later = losses.flip(0).cummin(0).values.flip(0)[1:]
    stay = torch.sigmoid(50 * (losses[:-1] - best_later - 0.05))
    return F.binary_cross_entropy_with_logits(gates[:-1], 1 - stay, reduction="none").mean(0)


# Training


STAGES = (("depth", 0.78), ("gate", 0.84), ("settle", 0.95), ("gate", 1.0))  # until which share


def stage_at(progress: float) -> tuple[int, str, float]:
    """Index and name of the stage at this share of all steps, and how far within it we are."""
    begin = 0.0
    for index, (name, end) in enumerate(STAGES):
        if progress < end:
            return index, name, (progress - begin) / (end - begin)
        begin = end
    raise ValueError(f"progress {progress} is not below 1")


def learning_rate(stage: str, progress: float) -> float:
    """Share of the peak learning rate: warm up, hold, then fall linearly."""
    if stage == "gate":
        return 1 - progress
    peak = 1.0 if stage == "depth" else 0.15
    return peak * min(1.0, progress / 0.02, (1 - progress) / 0.5 + 0.01)


def optimizers(model: Ouro, stage: str, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the rest; the gate has a stage of its own."""
    gate = list(model.model.early_exit_gate.parameters())
    if stage == "gate":
        return [torch.optim.AdamW(gate, lr=1e-2, weight_decay=0.0)]
    matrices = [p for n, p in model.named_parameters() if ".layers." in n and p.dim() == 2]
    apart = {id(p) for p in (*matrices, *(gate if stage == "settle" else ()))}
    rest = [p for p in model.parameters() if id(p) not in apart]
    return [
        torch.optim.Muon(
            matrices, lr=lr, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def train(model: Ouro, tokenizer: Tokenizer, args, device: torch.device) -> None:
    """Run all stages on ``model``, ``args.steps`` in all."""
    level = Value("d", 0.2)
    loader = torch.utils.data.DataLoader(
        Batches(tokenizer, args.rows, level), batch_size=None, num_workers=args.workers,
        pin_memory=device.type == "cuda", prefetch_factor=4 if args.workers else None,
    )  # fmt: skip
    gate = model.model.early_exit_gate
    loss_of = {"depth": depth_loss, "settle": settle_loss, "gate": gate_loss}
    head = token_losses
    if device.type == "cuda":
        torch._dynamo.config.recompile_limit = 64
        model.run_layer = torch.compile(run_layer, dynamic=False)
        head = torch.compile(token_losses, dynamic=False)
    generator = torch.Generator(device).manual_seed(args.seed)
    stage_index = -1
    begun = logged = time.time()
    for step, batch in zip(range(args.steps), loader, strict=False):
        progress = step / args.steps
        index, stage, within = stage_at(progress)
        if index != stage_index:
            stage_index = index
            optimizer = optimizers(model, stage, args.lr)
            trained = [p for o in optimizer for group in o.param_groups for p in group["params"]]
            peaks = [group["lr"] for o in optimizer for group in o.param_groups]
        level.value = min(1.0, 0.2 + 2.5 * progress)
        for group, peak in zip((g for o in optimizer for g in o.param_groups), peaks, strict=True):
            group["lr"] = peak * learning_rate(stage, within)
        early = {"depth": within > 0.4, "settle": True, "gate": True}[stage]
        batch = [[x.to(device, non_blocking=True) for x in part] for part in batch]
        tokens = sum(length.sum() for _, _, length in batch)
        total = 0.0
        for ids, start, length in batch:
            threshold = torch.full((len(ids),), NEVER, device=device)
            if early and stage != "gate":
                half = len(ids) // 2
                threshold[:half] = torch.rand(half, device=device, generator=generator) * 0.9 + 0.05
            with torch.autocast(device.type, torch.bfloat16):
                with torch.set_grad_enabled(stage != "gate"):
                    states, target, mask = answer_states(model, ids, start, length, threshold)
                    losses = head(model.lm_head, states, target)
                gates = gate(states).squeeze(-1).float()
                loss = (loss_of[stage](gates, losses, threshold < 1) * mask).sum() / tokens
            loss.backward()
            total = total + loss.detach()
        nn.utils.clip_grad_norm_(trained, 1.0)
        for o in optimizer:
            o.step()
        model.zero_grad(set_to_none=True)
        if (step + 1) % args.log_every == 0:
            now = time.time()
            print(
                f"{stage} step {step + 1} loss {total.item():.4f}"
                f" {(now - logged) / args.log_every * 1e3:.1f} ms/step",
                flush=True,
            )
            logged = now
            if (step + 1) % (20 * args.log_every) == 0:
                quick = tasks.held_out_records((24,) * len(tasks.TASKS), seed=5)
                for loops in (1, 4):
                    result = evaluate(model, tokenizer, quick, device, loops=loops)
                    print(f"  loops {loops}: {result.line()}", flush=True)
    print(f"trained {args.steps} steps in {time.time() - begun:.0f} s", flush=True)
    model.run_layer = run_layer


# Evaluation: dense, without a cache. Every step runs the whole sequences again.


class Report:
    """Answers of one evaluation: correct or not, and the decoded tokens' depths, by problem."""

    def __init__(self, records: list[dict], correct: list[bool], depths: list[list[int]]):
        self.tasks = [r["metadata"]["task"] for r in records]
        self.correct, self.depths = np.array(correct), depths

    @property
    def accuracy(self) -> float:
        """Share of the problems answered correctly."""
        return float(self.correct.mean())

    @property
    def mean_depth(self) -> float:
        """Mean depth of the decode runs."""
        decoded = [d for row in self.depths for d in row[1:]]
        return sum(decoded) / max(1, len(decoded))

    def line(self) -> str:
        """Accuracy, mean depth and accuracy by task, in percent."""
        each = {t: 100 * self.correct[[u == t for u in self.tasks]].mean() for t in tasks.TASKS}
        by_task = " ".join(f"{t}={v:.0f}" for t, v in each.items())
        return f"accuracy {100 * self.accuracy:.1f} depth {self.mean_depth:.2f} {by_task}"


@torch.no_grad()
def evaluate(
    model: Ouro,
    tokenizer: Tokenizer,
    records: list[dict],
    device: torch.device,
    *,
    threshold: float = NEVER,
    loops: int = LOOPS,
) -> Report:
    """Greedy answers under the adaptive semantics of decoding."""
    chats = ["messages" in r for r in records]
    prompts = [
        tokenizer.encode(chat_prompt(r["messages"][0]["content"]) if chat else r["prompt"]).ids
        for r, chat in zip(records, chats, strict=True)
    ]
    start = torch.tensor([len(p) for p in prompts], device=device)
    width = int(start.max()) + tasks.MAX_TOKENS
    ids = torch.zeros(len(records), width, dtype=torch.long, device=device)
    for i, prompt in enumerate(prompts):
        ids[i, : len(prompt)] = torch.tensor(prompt)
    ends = torch.tensor([IM_END if chat else END_OF_TEXT for chat in chats], device=device)
    limit = torch.full((len(records),), threshold, device=device)
    done = torch.zeros(len(records), dtype=torch.bool, device=device)
    count = torch.zeros_like(start)
    rows = torch.arange(len(records), device=device)
    compiled, model.run_layer = model.run_layer, run_layer
    for _ in range(tasks.MAX_TOKENS):
        at = start + count - 1
        used = int(at.max()) + 1
        hidden, depth = model(ids[:, :used], start, limit, loops)
        token = model.lm_head(hidden[-1][rows, at.clamp(max=used - 1)]).argmax(-1)
        alive = ~done
        ids[rows[alive], (at + 1)[alive]] = token[alive]
        count += alive
        done |= token == ends
        if bool(done.all()):
            break
    model.run_layer = compiled
    correct, depths = [], []
    for i, r in enumerate(records):
        begin, end = int(start[i]), int(start[i] + count[i])
        text = tokenizer.decode(ids[i, begin:end].tolist())
        correct.append(bool(done[i]) and tasks.is_correct(text, r["metadata"]["answer"]))
        depths.append([loops, *depth[i, begin : end - 1].tolist()])
    return Report(records, correct, depths)


# Checkpoint


def save_checkpoint(model: Ouro, tokenizer: Tokenizer, folder: Path, threshold: float) -> None:
    """Write a checkpoint in the released format, its weights rounded to BF16."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {n: p.detach().cpu().bfloat16().contiguous() for n, p in model.named_parameters()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    heads, layers = model.hidden // HEAD_DIM, len(model.model.layers)
    config = {
        "architectures": ["OuroForCausalLM"], "model_type": "ouro",
        "vocab_size": VOCAB, "max_position_embeddings": 512,
        "hidden_size": model.hidden, "intermediate_size": model.inner,
        "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": heads, "head_dim": HEAD_DIM, "hidden_act": "silu",
        "use_sliding_window": False, "layer_types": ["full_attention"] * layers,
        "rms_norm_eps": 1e-6, "rope_theta": ROPE_THETA, "rope_scaling": None,
        "total_ut_steps": LOOPS, "early_exit_threshold": threshold,
        "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    save_tokenizer(tokenizer, folder)


def write_jsonl(path: Path, records: list[dict]) -> None:
    """Write one JSON object a line."""
    path.write_text("".join(json.dumps(r) + "\n" for r in records))


def pick_threshold(model: Ouro, tokenizer: Tokenizer, records: list[dict], device) -> float:
    """The smallest threshold within half a point of full depth on ``records``; 1 if none is."""
    full = evaluate(model, tokenizer, records, device).accuracy
    for threshold in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95):
        if evaluate(model, tokenizer, records, device, threshold=threshold).accuracy > full - 0.005:
            return threshold
    return 1.0


def main() -> None:
    """Train a model and write its folder, eval.jsonl and prompts.jsonl under OUT."""
    parser = argparse.ArgumentParser(description="Train tiny-ouro.")
    parser.add_argument("out", type=Path, help="folder to write into")
    parser.add_argument("--steps", type=int, default=8000, help="steps of all stages together")
    parser.add_argument("--rows", type=int, default=512, help="short and long rows a step, each")
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--inner", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--workers", type=int, default=6, help="processes that make problems")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=100)
    parser.add_argument("--smoke", action="store_true", help="a few steps of a very small model")
    args = parser.parse_args()
    if args.smoke:
        args.steps, args.rows, args.workers, args.log_every = 20, 8, 0, 5
        args.hidden, args.inner, args.layers = 64, 128, 1
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    tokenizer = train_tokenizer()
    args.out.mkdir(parents=True, exist_ok=True)
    counts = (2,) * len(tasks.TASKS) if args.smoke else tasks.EVAL_COUNTS
    records = tasks.held_out_records(counts, tasks.EVAL_SEED)
    write_jsonl(args.out / "eval.jsonl", records)
    write_jsonl(
        args.out / "prompts.jsonl", tasks.held_out_records(tasks.PROMPTS_COUNTS, tasks.PROMPTS_SEED)
    )
    model = Ouro(args.hidden, args.inner, args.layers).to(device)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters on {device}", flush=True)
    train(model, tokenizer, args, device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    for loops in range(1, LOOPS + 1):
        line = evaluate(model, tokenizer, records, device, loops=loops).line()
        print(f"loops {loops}: {line}", flush=True)
    choice = tasks.held_out_records(counts, tasks.CHOICE_SEED)
    threshold = pick_threshold(model, tokenizer, choice, device)
    line = evaluate(model, tokenizer, records, device, threshold=threshold).line()
    print(f"threshold {threshold}: {line}", flush=True)
    save_checkpoint(model, tokenizer, args.out / "tiny-ouro", threshold)


if __name__ == "__main__":
    main()

"""The learning task: the text of the roles, the frozen base with its adapters, training and test.

`python -m roles.task` trains the base, once: on the text of the roles that are no clients.
"""

from functools import cache

import torch
from peft import LoraConfig, TaskType, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from lindt.data.download import data_folder
from lindt.data.shakespeare import ALPHABET, shakespeare
from lindt.data.sources import Text

WINDOW, STRIDE = 32, 5
CLIENTS = 10  # at most: the roles with the most text, which the base does not see
SCORED = 15  # characters at the end of a test window; test windows begin so far apart, so each counts once
TESTS = 200  # windows, from the last fifth of a role's text: 3000 characters
BASE = data_folder("flower-lora") / "base.safetensors"
# The other vocabulary numbers the small letters from z to a, as a vocabulary file of another version might.
LETTERS = "abcdefghijklmnopqrstuvwxyz"
OTHER = torch.tensor([ALPHABET.index(LETTERS[25 - LETTERS.index(c)] if c in LETTERS else c) for c in ALPHABET])


@cache
def windows():
    """All windows of characters, each with the one that follows; which are for training; and whose they are."""
    pools = shakespeare(test_share=0.2, seed=0, text=Text(window=WINDOW, stride=STRIDE, split="blocked"))
    largest = torch.bincount(pools.roles.long()).argsort(descending=True, stable=True)[:CLIENTS].tolist()
    return pools, largest


def text_at(starts):
    pools, _ = windows()
    return torch.cat([pools.x[starts], pools.y[starts, None]], 1).long()


def own_text(context, split):
    """The windows of a client's role: "train", "test" from the end of its text, or "unread", which come after those."""
    pools, largest = windows()
    client, starts = context.node_config["partition-id"], pools.train if split == "train" else pools.test
    mine = starts[pools.roles[starts] == largest[client]]
    if split != "train":
        first = 0 if split == "test" else TESTS
        mine = mine[:: SCORED // STRIDE][first : first + TESTS]
    found = text_at(mine)
    return OTHER[found] if context.run_config["two-vocabularies"] and client % 2 else found


def untrained():
    config = GPT2Config(
        vocab_size=len(ALPHABET), n_positions=WINDOW, n_embd=64, n_layer=2, n_head=4,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


@cache
def base():
    """The frozen base, with adapters. A process has one, whichever adapters it works on: w, v_i or P_i."""
    if not BASE.exists():
        raise SystemExit(f"{BASE} is not there; train it with `python -m roles.task`")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = untrained()
        model.load_state_dict(load_file(BASE), strict=False)  # the head shares its weights with the embedding
        lora = LoraConfig(
            task_type=TaskType.CAUSAL_LM, r=8, lora_alpha=16, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True
        )
        return get_peft_model(model, lora)


def with_adapters(arrays):
    set_peft_model_state_dict(base(), arrays)
    return base()


def adapters(model):
    """The message's arrays: A and B of each layer, and nothing of the base."""
    return get_peft_model_state_dict(model)


def train(model, windows, steps, rate, size=16):
    """Returns the mean loss over the batches."""
    losses = []
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
    model.train()
    for _ in range(steps):
        batch = windows[torch.randint(len(windows), (size,))]
        optimizer.zero_grad()
        logits = model(input_ids=batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


@torch.no_grad()
def test(model, windows):
    """Loss and accuracy over the last characters of the windows, and their number."""
    model.eval()
    logits = torch.cat([model(input_ids=part[:, :-1]).logits[:, -SCORED:] for part in windows.split(256)]).flatten(0, 1)
    wanted = windows[:, -SCORED:].flatten()
    loss = torch.nn.functional.cross_entropy(logits, wanted)
    return loss.item(), (logits.argmax(1) == wanted).float().mean().item(), len(wanted)


def train_base(steps=1500):
    """The base learns from all roles but those of the clients."""
    pools, largest = windows()
    starts = pools.train[~torch.isin(pools.roles[pools.train], torch.tensor(largest))]
    torch.manual_seed(0)
    model, text = untrained(), text_at(starts)
    for part in range(10):
        loss = train(model, text, steps // 10, rate=0.003, size=32)
        print(f"base: {(part + 1) * (steps // 10)} steps, loss {loss:.2f}")
    BASE.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: p.detach() for name, p in model.named_parameters()}, BASE)
    print(f"base: {sum(p.numel() for p in model.parameters()):,} weights in {BASE}")


if __name__ == "__main__":
    torch.set_num_threads(1)  # the model is too small for more
    train_base()
